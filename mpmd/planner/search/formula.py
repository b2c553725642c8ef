"""Evaluates a candidate by formulas: its schedule is simulated with the analytic costs of its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpmd.ir.tasks import TaskType
from mpmd.planner.candidate import Candidate, Memory, Prediction
from mpmd.planner.collectives import Place, message_link
from mpmd.planner.search.orders import Order, order_of, prolong, simulated_numbers
from mpmd.planner.search.stages import CostModel, Stages
from mpmd.planner.shared_cores import groups_at_once, time_alone, time_together


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A candidate, what is predicted, and what explains it.

    Attributes:
      places: the devices of its groups.
      slowest: the time of the group that works longest in the loop, over the mean of all groups.
      computing: seconds of the group that works longest, without sums over devices.
      sums: its seconds of sums over devices.
      waiting: its seconds of waiting.
      num_tasks: how many tasks were simulated.
    """

    candidate: Candidate
    prediction: Prediction
    places: tuple[Place, ...]
    slowest: float
    computing: float
    sums: float
    waiting: float
    num_tasks: int

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


def evaluate(model: CostModel, candidate: Candidate) -> Evaluation:
    """What a candidate costs, by formulas for its tasks and the simulation of its schedule.

    Raises: ``ValueError`` where the schedule does.
    """
    schedule, num_microbatches = candidate.schedule, candidate.num_microbatches
    simulated = simulated_numbers(schedule, num_microbatches)
    orders = [order_of(schedule, number) for number in simulated]
    stages = Stages(model, candidate, orders[-1].homes)
    cluster, groups = model.cluster, schedule.mpmd_dim
    devices = sum(place.num_devices for place in stages.places) / groups
    alone, at_once = time_alone(cluster), groups_at_once(cluster, devices)
    times = {task_type: alone * time for task_type, time in _task_times(stages).items()}
    messages = stages.messages()
    together = float(time_together(cluster, float(groups), devices))
    steps = [together * step for step in _step_seconds(stages)]
    work = [
        sum(times[TaskType(kind, stage)] for kind in orders[-1].kinds) for stage in range(schedule.num_stages)
    ]
    works = stages.of_groups(work)
    loops = [order.timed.run(times, *messages, at_once) for order in orders]
    least = max(*works, sum(works) / at_once)
    ends = prolong([loop.ends for loop in loops], simulated, num_microbatches, least)
    busy = prolong([loop.busy for loop in loops], simulated, num_microbatches)
    seconds = max(end + step for end, step in zip(ends, steps, strict=True))
    memories = [_memory_parts(stages, order) for order in orders]
    memory = [
        Memory(group, *prolong([parts[group] for parts in memories], simulated, num_microbatches))
        for group in range(schedule.mpmd_dim)
    ]
    summing = zip(
        stages.of_groups(stages.sums("sums")), stages.of_groups(stages.sums("step_sums")), strict=True
    )
    sums = [
        alone * of_loop * time / work + together * of_step if work else 0.0
        for (of_loop, of_step), time, work in zip(summing, busy, works, strict=True)
    ]
    longest = max(range(len(busy)), key=lambda group: busy[group] + steps[group])
    longest_work = busy[longest] + steps[longest]
    prediction = Prediction(
        seconds=seconds,
        bubble=1 - (sum(busy) + sum(steps)) / (seconds * len(busy)) if seconds else 0.0,
        communication=sums[longest] / seconds if seconds else 0.0,
        memory=max(memory, key=lambda parts: parts.total),
        stage_seconds=tuple(
            alone * (forward + backward)
            for forward, backward in zip(stages.sums("forward"), stages.sums("backward"), strict=True)
        ),
        source="formula",
    )
    return Evaluation(
        candidate=candidate,
        prediction=prediction,
        places=stages.places,
        slowest=max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0,
        computing=longest_work - sums[longest],
        sums=sums[longest],
        waiting=seconds - longest_work,
        num_tasks=sum(order.num_tasks for order in orders),
    )


def _task_times(stages: Stages) -> dict[TaskType, float]:
    overhead = stages.model.cluster.task_overhead
    forwards, backwards = stages.sums("forward"), stages.sums("backward")
    times: dict[TaskType, float] = {}
    for stage, weights in enumerate(stages.sums("backward_weights")):
        times[TaskType("fwd", stage)] = forwards[stage] + overhead
        times[TaskType("bwd", stage)] = backwards[stage] + overhead
        times[TaskType("bwdA", stage)] = backwards[stage] - weights + overhead
        times[TaskType("bwdW", stage)] = weights + overhead
    return times


def _step_seconds(stages: Stages) -> list[float]:
    """For each group, what it does after its last task: sums of gradients, and the optimizer.

    The replicas of weights that groups share are summed, over a link there and back.
    """
    model = stages.model
    steps = stages.of_groups(stages.sums("step"))
    for layers, nbytes in model.profile.tied:
        homes = [stages.homes[stages.stage_of[layer]] for layer in layers]
        for group, layer in dict(zip(homes, layers, strict=True)).items():
            others = [other for other in dict.fromkeys(homes) if other != group]
            for other in others[:1]:
                link = message_link(model.cluster, stages.places[group], stages.places[other])
                share = _share_of_layer(stages, group, layer, "gradients", nbytes)
                steps[group] += 2 * (link.latency + share / link.bandwidth)
    return steps


def _share_of_layer(stages: Stages, group: int, layer: int, name: str, nbytes: float) -> float:
    """What a device of a group has, by ``name``, for ``nbytes`` of a layer's weights."""
    weights = stages.model.profile.layers[layer].weights
    return float(stages.tables[group].layers[name][layer]) * nbytes / weights if weights else 0.0


def _held_already(stages: Stages) -> Iterator[tuple[int, int, int]]:
    """The groups, layers and bytes of weights that another layer of the group has as well."""
    for layers, nbytes in stages.model.profile.tied:
        groups: set[int] = set()
        for layer in layers:
            group = stages.homes[stages.stage_of[layer]]
            if group in groups:
                yield group, layer, nbytes
            groups.add(group)


def _memory_parts(stages: Stages, order: Order) -> list[list[float]]:
    """For each group, the bytes on each of its devices, as the fields of ``Memory``."""
    weights, gradients, state = (
        stages.of_groups(stages.sums(name)) for name in ("weights", "gradients", "state")
    )
    for group, layer, nbytes in _held_already(stages):
        weights[group] -= _share_of_layer(stages, group, layer, "weights", nbytes)
        state[group] -= _share_of_layer(stages, group, layer, "state", nbytes)
    residuals, temporaries = stages.sums("residuals"), stages.largest("temporaries")
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
                sum(count * residuals[stage] for count, stage in zip(counts, own, strict=True))
                for counts in order.in_flight[group]
            ),
            messages[group],
            max(temporaries[stage] for stage in own),
        ]
        for group, own in enumerate(order.stages)
    ]
