"""The best candidate of all, found by simulating every one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.layer_profile import Kind, LayerProfile
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.stages import CostModel
from mpmd.schedules import FAMILIES, Schedule

KINDS: tuple[Kind, ...] = ("model", "sequence", "data")


def brute_force(model: CostModel, remat: tuple[bool, ...], fsdp: tuple[bool, ...]) -> Row | None:
    """The shortest step that fits; ``None`` if nothing fits."""
    evaluations = (evaluate(model, candidate) for candidate in every_candidate(model, remat, fsdp))
    fitting = (e for e in evaluations if e.prediction.memory.total <= model.cluster.memory)
    return min(fitting, key=lambda evaluation: evaluation.seconds, default=None)


def every_candidate(model: CostModel, remat: tuple[bool, ...], fsdp: tuple[bool, ...]) -> Iterator[Candidate]:
    """Each cut, each submesh of each group, each schedule that is not made for given times, and so on."""
    profile, devices = model.profile, model.cluster.nodes * model.cluster.devices_per_node
    for cut in _cuts(len(profile.layers)):
        for schedule in _schedules(len(cut), profile.has_backward):
            for submeshes in itertools.product(_submeshes(profile, devices), repeat=schedule.mpmd_dim):
                if sum(math.prod(submesh.values()) for submesh in submeshes) > devices:
                    continue
                for number in range(1, profile.rows + 1):
                    rows, left = divmod(profile.rows, number)
                    if left or any(rows % submesh["data"] for submesh in submeshes):
                        continue
                    for again, divided in itertools.product(remat, fsdp):
                        for once in (False, True) if divided else (False,):
                            yield Candidate(cut, submeshes, schedule, number, again, divided, once)


def _cuts(num_layers: int) -> Iterator[tuple[int, ...]]:
    for marks in itertools.product((False, True), repeat=num_layers - 1):
        bounds = [0, *(index + 1 for index, mark in enumerate(marks) if mark), num_layers]
        yield tuple(stop - start for start, stop in itertools.pairwise(bounds))


def _schedules(num_stages: int, has_backward: bool) -> Iterator[Schedule]:
    for name, family in FAMILIES.items():
        if name == "ListSchedule" or (name == "ForwardOnly") == has_backward:
            continue
        for groups in range(1, num_stages + 1):
            try:
                yield family.build(groups, num_stages)
            except ValueError:  # the family has no schedule of this size
                continue


def _submeshes(profile: LayerProfile, devices: int) -> list[dict[Kind, int]]:
    sizes = [[n for n in range(1, devices + 1) if _divides(profile, kind, n)] for kind in KINDS]
    products = (dict(zip(KINDS, choice, strict=True)) for choice in itertools.product(*sizes))
    return [submesh for submesh in products if math.prod(submesh.values()) <= devices]


def _divides(profile: LayerProfile, kind: Kind, number: int) -> bool:
    if kind == "data":
        return profile.rows % number == 0
    divisions = [layer.divisions[kind] for layer in profile.layers if kind in layer.divisions]
    return number == 1 or (bool(divisions) and all(d.largest % number == 0 for d in divisions))
