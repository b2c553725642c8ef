"""The best candidate of all, found by simulating every one."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.layer_profile import Kind, LayerProfile
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import INNERMOST_FIRST, Submesh
from mpmd.schedules import FAMILIES, Schedule


def brute_force(model: CostModel, remat: tuple[bool, ...], fsdp: tuple[bool, ...]) -> Row | None:
    """The shortest step that fits; ``None`` if nothing fits."""
    evaluations = (evaluate(model, candidate) for candidate in every_candidate(model, remat, fsdp))
    fitting = (row for row in evaluations if row.missing_bytes(model.cluster) <= 0)
    return min(fitting, key=lambda row: row.seconds, default=None)


def every_candidate(model: CostModel, remat: tuple[bool, ...], fsdp: tuple[bool, ...]) -> Iterator[Candidate]:
    """Each cut, each submesh of each group, each schedule that is not made for given times, and so on."""
    profile, cluster = model.profile, model.cluster
    submesh_options = [
        submesh
        for name, pool in zip(cluster.pool_names, cluster.pools, strict=True)
        for submesh in _submeshes(profile, pool.num_devices, name)
    ]
    for cut in _cuts(len(profile.layers)):
        for schedule in _schedules(len(cut), profile.has_backward):
            for submeshes in itertools.product(submesh_options, repeat=schedule.mpmd_dim):
                used = collections.Counter[str]()
                for submesh in submeshes:
                    used[submesh.pool] += submesh.num_devices
                if any(number > cluster.pool(name).num_devices for name, number in used.items()):
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


def _submeshes(profile: LayerProfile, devices: int, pool: str) -> list[Submesh]:
    sizes = [[n for n in range(1, devices + 1) if _divides(profile, kind, n)] for kind in INNERMOST_FIRST]
    submeshes = (Submesh(*choice, pool) for choice in itertools.product(*sizes))
    return [submesh for submesh in submeshes if submesh.num_devices <= devices]


def _divides(profile: LayerProfile, kind: Kind, number: int) -> bool:
    if kind == "data":
        return profile.rows % number == 0
    divisions = [layer.divisions[kind] for layer in profile.layers if kind in layer.divisions]
    return number == 1 or (bool(divisions) and all(d.largest % number == 0 for d in divisions))
