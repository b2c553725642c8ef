"""Measures the steps of ``workshop_strategies.py``, and holds what the guide claims against it."""

import collections
import dataclasses
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax

import mpmd
from mpmd.ir.events import Event


@dataclasses.dataclass(frozen=True)
class Result:
    """The predictions for a strategy, what XLA compiled for it, and the measurements.

    Attributes:
      peak_bytes: the bytes that each device of the worst group needs, as its allocator counted them, or else,
        as on CPUs, the values and XLA's temporaries of the compiled step.
      residual_bytes: the largest share of ``peak_bytes`` that tasks leave for later tasks.
      num_devices: the number of devices that compute.
      stage_seconds: the seconds of one microbatch in each stage.
      collectives: seconds by the kind of collective, in a step of ``profiled_seconds``; ``None`` where the
        platform does not record the work of devices.
      seconds: the fastest of several steps; ``None`` if none was timed.
    """

    choice: mpmd.Choice
    peak_bytes: int
    residual_bytes: int
    num_devices: int
    stage_seconds: Sequence[float]
    collectives: Mapping[str, float] | None
    profiled_seconds: float
    seconds: float | None = None

    @property
    def predicted(self) -> dict:
        """The row of the choice: seconds, bytes and shares."""
        return json.loads(self.choice.to_json())["rows"][0]


def profiled(choice: mpmd.Choice, step, state, batch: Sequence) -> Result:
    """The result of a step that has run before: of its profile and its report."""
    with tempfile.TemporaryDirectory() as trace_dir:
        _, events = step.profile(state, *batch, trace_dir=trace_dir)
        collectives = mpmd.collective_seconds(trace_dir)
    groups = step.report().groups
    return Result(
        choice=choice,
        peak_bytes=max(group.measured_peak_bytes or group.peak_bytes for group in groups),
        residual_bytes=max(group.memory.peak.activations for group in groups),
        num_devices=sum(submesh.size for submesh in step.submeshes),
        stage_seconds=stage_seconds(events),
        collectives=collectives,
        profiled_seconds=max(event.end for event in events) - min(event.start for event in events),
    )


def fastest(steps: Mapping[str, Callable], state, batch: Sequence, num_steps: int) -> dict[str, float]:
    """The seconds of the fastest of some runs of each step, which other work disturbs the least.

    The steps take turns, so that work on the machine that comes and goes disturbs all alike.
    """
    states, seconds = dict.fromkeys(steps, state), dict.fromkeys(steps, math.inf)
    for _ in range(num_steps):
        for name, step in steps.items():
            start = time.perf_counter()
            states[name], _ = jax.block_until_ready(step(states[name], *batch))
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def print_measured(results: Mapping[str, Result], tokens: int, one_device: float) -> None:
    """Prints measurements beside predictions, the fastest strategy first.

    Args:
      tokens: those of a step.
      one_device: the seconds of a step in plain JAX, on one device, which is the speedup's 1.
    """
    print(f"\nMeasured here; plain jax.jit on one device takes {one_device * 1e3:.1f} ms")
    columns = (
        "step (predicted)  tokens/s  speedup  efficiency   peak memory (predicted)  collectives (predicted)"
    )
    print(f"{'strategy':23}      {columns}")
    timed = {name: result for name, result in results.items() if result.seconds is not None}
    for name, result in sorted(timed.items(), key=lambda item: item[1].seconds):
        predicted, speedup = result.predicted, one_device / result.seconds
        predicted_step = f"({predicted['seconds'] * 1e3:.1f})"
        predicted_peak = f"({predicted['memory']['total'] / 2**20:.2f})"
        print(
            f"{name:23} {result.seconds * 1e3:6.1f} ms {predicted_step:>11}",
            f"{tokens / result.seconds:9.0f}  {speedup:6.2f}x  {speedup / result.num_devices:10.1%}",
            f"{result.peak_bytes / 2**20:9.2f} MiB {predicted_peak:>11} ",
            shares_text(result.collectives, result.profiled_seconds),
            f"({predicted['communication']:.0%})",
        )
    print("collectives: shares of a step that a device is in them, waiting for others included, by the trace")


def shares_text(collectives: Mapping[str, float] | None, seconds: float) -> str:
    """The measured share of each kind of collective in a step of some seconds."""
    if collectives is None:
        return "not recorded on this platform"
    return ", ".join(f"{kind} {s / seconds:.0%}" for kind, s in sorted(collectives.items())) or "none"


def stage_seconds(events: Sequence[Event]) -> list[float]:
    """The measured seconds of each stage for a microbatch: the median of each of its tasks, added up."""
    seconds = collections.Counter()
    for task_type, median in mpmd.simulate.Costs.measured(events).tasks.items():
        seconds[task_type.stage] += median
    return [seconds[stage] for stage in sorted(seconds)]


def balanced(layers_per_stage: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...]:
    """The layers of as many stages, so that the slowest takes the least time.

    Args:
      layers_per_stage, seconds: of the stages that were measured; the layers of a stage count alike.
    """
    per_layer = [s / n for n, s in zip(layers_per_stage, seconds, strict=True) for _ in range(n)]

    def slowest(cuts: Sequence[int]) -> float:
        return max(sum(per_layer[start:stop]) for start, stop in itertools.pairwise(cuts))

    inner = itertools.combinations(range(1, len(per_layer)), len(layers_per_stage) - 1)
    best = min(((0, *cuts, len(per_layer)) for cuts in inner), key=slowest)
    return tuple(stop - start for start, stop in itertools.pairwise(best))
