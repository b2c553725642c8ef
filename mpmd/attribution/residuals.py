"""The bytes that forwards leave for backwards, from a plan."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from mpmd.ir.plan import GroupProgram, OutsideTask, Plan, Run, Task
from mpmd.memory import sizes_on_devices


def residual_bytes(plan: Plan) -> dict[int, int]:
    """By stage, the bytes on each device that a microbatch's forward leaves for its backward.

    Stages whose forward and backward run as one task leave nothing, and are left out.
    """
    residuals: dict[int, int] = {}
    for program in plan.programs:
        sizes = sizes_on_devices(plan, program.mpmd_idx)
        resident = plan.resident(program.mpmd_idx).keys()
        inputs: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
        forwards: dict[tuple[int, int], Run] = {}
        for task, run in _tasks_alone(program):
            if task.kind == "fwd":
                forwards[task.stage, task.microbatch] = run
            else:
                inputs[task.stage, task.microbatch].update(run.inputs)
        for key, run in forwards.items():
            held = ({*run.inputs, *run.outputs} - resident) & inputs[key]
            if key in inputs:
                stage, _ = key
                residuals[stage] = max(residuals.get(stage, 0), sum(sizes[name] for name in held))
    return residuals


def _tasks_alone(program: GroupProgram) -> Iterator[tuple[Task, Run]]:
    """The runs of tasks that are not fused."""
    for run in program.runs:
        if not isinstance(run.task, OutsideTask) and len(run.task.tasks) == 1:
            yield run.task.tasks[0], run
