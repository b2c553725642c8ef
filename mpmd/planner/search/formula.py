"""Evaluates a candidate by formulas: its schedule is simulated with the analytic costs of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mpmd.ir.tasks import TaskType
from mpmd.planner.candidate import Candidate, Memory, Prediction, Row
from mpmd.planner.collectives import message_link
from mpmd.planner.search.orders import Order, order_of, prolong, simulated_numbers
from mpmd.planner.search.stages import CostModel, Stages
from mpmd.planner.search.timed_order import LoopTimes


def evaluate(model: CostModel, candidate: Candidate) -> Row:
    """The cost of a candidate, by formulas for its tasks and the simulation of its schedule.

    Raises: ``ValueError`` where the schedule does.
    """
    simulated = simulated_numbers(candidate.schedule, candidate.num_microbatches)
    orders = [order_of(candidate.schedule, number) for number in simulated]
    stages = Stages(model, candidate, orders[-1].homes)
    times, slices, at_once = _task_times(stages), candidate.schedule.slices, stages.groups_at_once
    kinds = sorted(orders[-1].kinds)
    of_stages = [sum(times[TaskType(kind, stage)] for kind in kinds) for stage in range(len(stages.homes))]
    works = stages.of_groups(of_stages)
    least = max(*works, sum(works) / at_once)
    loop = _loop(stages, orders, simulated, times, slices * least)
    together = max(1.0, len(works) / at_once)
    steps = [together * seconds for seconds in step_seconds(stages)]
    seconds = max(end + step for end, step in zip(loop.ends, steps, strict=True))
    longest = max(range(len(steps)), key=lambda group: loop.busy[group] + steps[group])
    reducing = _all_reduce_seconds(stages, together, loop, works)[longest]
    prediction = Prediction(
        seconds=seconds,
        bubble=1 - (sum(loop.busy) + sum(steps)) / (seconds * len(steps)) if seconds else 0.0,
        communication=reducing / seconds if seconds else 0.0,
        memory=_largest_memory(stages, orders, simulated),
        stage_seconds=tuple(
            slices * (forward + backward)
            for forward, backward in zip(stages.totals("forward"), stages.totals("backward"), strict=True)
        ),
        source="formula",
    )
    return Row(candidate, prediction)


def _loop(
    stages: Stages,
    orders: Sequence[Order],
    simulated: tuple[int, ...],
    times: Mapping[TaskType, float],
    least: float,
) -> LoopTimes:
    """The time at which each group ends the loop, and the seconds that it computes.

    Args:
      orders: of the schedule, for each simulated number of microbatches.
      least: the seconds that the loop takes at least for each microbatch.
    """
    messages, number = stages.messages(), stages.candidate.num_microbatches
    loops = [order.timed.run(times, *messages, stages.groups_at_once) for order in orders]
    return LoopTimes(
        ends=prolong([loop.ends for loop in loops], simulated, number, least),
        busy=prolong([loop.busy for loop in loops], simulated, number),
    )


def _all_reduce_seconds(
    stages: Stages, together: float, loop: LoopTimes, works: Sequence[float]
) -> list[float]:
    """For each group, the seconds of a step that go into all-reduces and gathered weights.

    Args:
      together: the time of tasks while all groups compute, over that while one does.
      works: for each group, the seconds of its tasks of one pass.
    """
    in_tasks = stages.of_groups(stages.totals("all_reduce"))
    after_loop = stages.of_groups(stages.totals("step_all_reduce"))
    for group, layer, nbytes in _held_already(stages):
        after_loop[group] -= _share_of_layer(stages, group, layer, "step_all_reduce", nbytes)
    return [
        of_pass * busy / work + together * of_step if work else 0.0
        for of_pass, of_step, busy, work in zip(in_tasks, after_loop, loop.busy, works, strict=True)
    ]


def _task_times(stages: Stages) -> dict[TaskType, float]:
    overheads = stages.task_overheads
    forwards, backwards = stages.totals("forward"), stages.totals("backward")
    times: dict[TaskType, float] = {}
    for stage, weights in enumerate(stages.totals("backward_weights")):
        overhead = overheads[stage]
        times[TaskType("fwd", stage)] = forwards[stage] + overhead
        times[TaskType("bwd", stage)] = backwards[stage] + overhead
        times[TaskType("bwdA", stage)] = backwards[stage] - weights + overhead
        times[TaskType("bwdW", stage)] = weights + overhead
    return times


def step_seconds(stages: Stages) -> list[float]:
    """For each group, the seconds after its last task: all-reduces of gradients, and the optimizer.

    Gradients of weights that several groups hold are summed over a link between two of the groups, there
    and back. Weights that several layers of one group share are summed and updated once.
    """
    model = stages.model
    steps = stages.of_groups(stages.totals("step"))
    for group, layer, nbytes in _held_already(stages):
        steps[group] -= _share_of_layer(stages, group, layer, "step", nbytes)
    for layers, nbytes in model.profile.tied:
        homes = [stages.homes[stages.stage_of[layer]] for layer in layers]
        for group, layer in dict(zip(homes, layers, strict=True)).items():
            others = [other for other in dict.fromkeys(homes) if other != group]
            for other in others[:1]:
                link = message_link(model.cluster, stages.device_ranges[group], stages.device_ranges[other])
                share = _share_of_layer(stages, group, layer, "gradients", nbytes)
                steps[group] += 2 * (link.latency + share / link.bandwidth)
    return steps


def _share_of_layer(stages: Stages, group: int, layer: int, name: str, nbytes: float) -> float:
    """The part of a layer's cost, such as the bytes that a device holds, for ``nbytes`` of its weights."""
    weights = stages.model.profile.layers[layer].weights
    return stages.held(group, layer, name) * nbytes / weights if weights else 0.0


def _held_already(stages: Stages) -> Iterator[tuple[int, int, int]]:
    """The groups, layers and bytes of weights that another layer of the same group already holds."""
    for layers, nbytes in stages.model.profile.tied:
        groups: set[int] = set()
        for layer in layers:
            group = stages.homes[stages.stage_of[layer]]
            if group in groups:
                yield group, layer, nbytes
            groups.add(group)


def group_memories(model: CostModel, candidate: Candidate) -> list[Memory]:
    """The memory of each group of a candidate, without a simulation of its schedule."""
    simulated = simulated_numbers(candidate.schedule, candidate.num_microbatches)
    orders = [order_of(candidate.schedule, number) for number in simulated]
    return _memories(Stages(model, candidate, orders[-1].homes), orders, simulated)


def _largest_memory(stages: Stages, orders: Sequence[Order], simulated: tuple[int, ...]) -> Memory:
    """The memory of the group whose devices need most, or lack most where groups are of several kinds."""
    memories = _memories(stages, orders, simulated)
    return max(memories, key=lambda memory: (memory.total - stages.pools[memory.group].memory, memory.total))


def _memories(stages: Stages, orders: Sequence[Order], simulated: tuple[int, ...]) -> list[Memory]:
    of_orders = [_memory_parts(stages, order) for order in orders]
    return [
        Memory(
            group,
            *prolong([parts[group] for parts in of_orders], simulated, stages.candidate.num_microbatches),
        )
        for group in range(len(orders[-1].stages))
    ]


def _memory_parts(stages: Stages, order: Order) -> list[list[float]]:
    """For each group, the bytes on each of its devices, as the fields of ``Memory``."""
    weights, gradients, state = (
        stages.of_groups(stages.totals(name)) for name in ("weights", "gradients", "state")
    )
    for group, layer, nbytes in _held_already(stages):
        weights[group] -= _share_of_layer(stages, group, layer, "weights", nbytes)
        state[group] -= _share_of_layer(stages, group, layer, "state", nbytes)
    residuals, temporaries = stages.totals("residuals"), stages.largest("temporaries")
    messages = stages.skipped_bytes()
    for stage in range(1, len(stages.homes)):
        for group in (stages.homes[stage - 1], stages.homes[stage]):
            if stages.homes[stage - 1] != stages.homes[stage]:
                messages[group] += 2 * stages.message_bytes(stage, group)
    messages[stages.homes[0]] += stages.model.profile.batch / stages.group_settings[stages.homes[0]].sizes[-1]
    return [
        [
            weights[group],
            gradients[group],
            state[group],
            max(
                sum(count * residuals[stage] for count, stage in zip(counts, stages_of_group, strict=True))
                for counts in order.in_flight[group]
            ),
            messages[group],
            max(temporaries[stage] for stage in stages_of_group),
        ]
        for group, stages_of_group in enumerate(order.stages)
    ]
