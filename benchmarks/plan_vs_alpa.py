"""The plans that Alpa would have chosen for the same costs: ``python -m benchmarks.plan_vs_alpa``.

Alpa (Zheng et al., 2022, arXiv:2201.12023, section 5.2) minimises ``sum of stages + (B - 1) * slowest stage``
over runs of layers and submeshes, which have a power of two of devices or whole nodes, and share out all
devices. The number of microbatches is given, and the schedule is 1F1B. Both choices are predicted by the same
formulas and the same simulator. No device is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Table
from mpmd.planner.candidate import Candidate
from mpmd.planner.cluster import Cluster
from mpmd.planner.collectives import DeviceRange
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.search.formula import Evaluation, evaluate
from mpmd.planner.search.partition import StageRangeCosts
from mpmd.planner.search.search import search
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import INNERMOST_FIRST, Submesh
from mpmd.schedules import Std1F1B
from tests.support.profiles import a100s, gpt, layer, profile, u_net

MOST_LIMITS = 64


@dataclasses.dataclass(frozen=True)
class _Option:
    submesh: Submesh
    size: int
    seconds: np.ndarray
    range_costs: StageRangeCosts


def alpa_choice(made: LayerProfile, cluster: Cluster, number: int, remat: bool) -> Evaluation | None:
    """The candidate of Alpa's objective; ``None`` if it finds none that fits."""
    model = CostModel(made, cluster)
    options = [*_options(model, number, remat)]
    lengths = np.unique(np.concatenate([option.seconds.ravel() for option in options]))
    lengths = lengths[np.isfinite(lengths)]
    limits = lengths[np.linspace(0, len(lengths) - 1, min(MOST_LIMITS, len(lengths))).astype(int)]
    best, chosen = math.inf, None
    for limit in limits:
        if (number - 1) * limit < best:
            total, stages = _shortest_sum(model, options, number, limit)
            if stages and total + (number - 1) * limit < best:
                best, chosen = total + (number - 1) * limit, stages
    if chosen is None:
        return None
    submeshes, layers = zip(*chosen, strict=True)
    return evaluate(model, Candidate(layers, submeshes, Std1F1B(len(layers)), number, remat, False))


def _options(model: CostModel, number: int, remat: bool) -> Iterator[_Option]:
    per_node = model.cluster.devices_per_node
    for submesh in SearchSpace(model, Constraints(num_microbatches=number)).submeshes:
        size = submesh.num_devices
        powers = size & (size - 1) == 0 and size <= per_node
        if (powers or size % per_node == 0) and model.profile.rows // number % submesh.data == 0:
            alone = Candidate((), (submesh,), Std1F1B(1), number, remat, fsdp=False)
            table = model.table(model.group_settings(DeviceRange(0, submesh), alone))
            range_costs = StageRangeCosts.of(
                table, 2 * model.cluster.task_overhead, np.zeros(len(model.profile.layers) + 1)
            )
            yield _Option(submesh, size, range_costs.seconds, range_costs)


def _shortest_sum(
    model: CostModel, options: list[_Option], number: int, limit: float
) -> tuple[float, list[tuple[Submesh, int]]]:
    """The least sum of stages, none longer than a limit, on all devices; and the stages."""
    num_layers, memory = len(model.profile.layers), model.cluster.memory
    devices = model.cluster.nodes * model.cluster.devices_per_node
    best = np.full((num_layers + 1, devices + 1), math.inf)
    best[num_layers, 0] = 0.0
    found, choices = (math.inf, 0), []
    for behind in range(1, min(num_layers, devices) + 1):
        values = np.full((len(options), *best.shape), math.inf)
        stops = np.zeros(values.shape, int)
        for index, option in enumerate(options):
            seconds = option.range_costs.fitting(min(behind, number), memory)
            seconds = np.where(seconds <= limit, seconds, math.inf)
            left = np.full_like(best, math.inf)
            left[:, option.size :] = best[:, : devices + 1 - option.size]
            sums = seconds[:, :, None] + left[None, :, :]
            stops[index] = sums.argmin(axis=1)
            values[index] = sums.min(axis=1)
        picked = values.argmin(axis=0)
        best = values.min(axis=0)
        choices.append((picked, np.take_along_axis(stops, picked[None], axis=0)[0]))
        if best[0, devices] < found[0]:
            found = float(best[0, devices]), behind
    first, left_devices, stages = 0, devices, []
    for picked, stops_of in reversed(choices[: found[1]]):
        option = options[picked[first, left_devices]]
        stop = int(stops_of[first, left_devices])
        stages.append((option.submesh, stop - first))
        first, left_devices = stop, left_devices - option.size
    return found[0], stages


def problems() -> Iterator[tuple[str, LayerProfile, Cluster, int]]:
    """Names, steps, clusters and numbers of microbatches."""
    heavy_head = gpt(num_layers=12, width=1024, heads=16, length=1024, vocabulary=256_000, rows=64)
    uneven = [layer(str(i), 1e12 * (1 + i % 5), entering=10**7, residuals=10**7) for i in range(14)]
    yield "transformer, 24 layers", gpt(24, 2048, 16, rows=128), a100s(2), 32
    yield "transformer, heavy head", heavy_head, a100s(1), 16
    yield "U-Net", u_net(), a100s(1), 16
    yield "uneven layers", profile(tuple(uneven), 8), a100s(1), 8


def words(evaluation: Evaluation) -> str:
    candidate = evaluation.candidate
    sizes = [submesh.num_devices for submesh in candidate.submeshes]
    axes = [k for k in INNERMOST_FIRST if any(s[k] > 1 for s in candidate.submeshes)]
    return f"{'+'.join(map(str, sizes))} devices ({', '.join(axes)}), {candidate.schedule.name}"


def ratios(made: LayerProfile, cluster: Cluster, number: int) -> tuple[str, ...]:
    """Alpa's choice, ours with as much open as Alpa has and with more, and the ratios of the steps."""
    alpa = alpa_choice(made, cluster, number, remat=False)
    given = Constraints(num_microbatches=number, remat=False, fsdp=False)
    fixes = (dataclasses.replace(given, schedule="Std1F1B"), given, Constraints())
    ours = [
        evaluate(CostModel(made, cluster), search(made, cluster, constraints)[0].candidate)
        for constraints in fixes
    ]
    found = [words(ours[0]), words(ours[1])]
    if alpa is None:
        return ("none fits", *found, "", "", "")
    return (words(alpa), *found, *(f"{alpa.seconds / evaluation.seconds:.3f}" for evaluation in ours))


def main() -> None:
    """Prints the table."""
    rows = [(name, str(number), *ratios(*problem, number)) for name, *problem, number in problems()]
    header = (
        "",
        "microbatches",
        "Alpa",
        "ours, 1F1B",
        "ours, any schedule",
        "Alpa / ours, 1F1B",
        "any schedule",
        "all open",
    )
    print(Table("Predicted steps of Alpa's choice over those of ours", header, tuple(rows)))


if __name__ == "__main__":
    main()
