"""Plans of schedules that no compiler made: every stage hands an activation on, and a gradient back."""

from __future__ import annotations

from mpmd.ir.plan import (
    Aval,
    Executable,
    Free,
    GroupProgram,
    Instruction,
    LoopStages,
    Plan,
    Recv,
    Run,
    Send,
    Task,
)
from mpmd.schedules import Schedule

VALUE = Aval((256, 256), "float32", 4)
"""The type of all values."""


def plan_of_schedule(schedule: Schedule, num_microbatches: int) -> Plan:
    """The plan of a schedule of ``fwd`` and ``bwd`` alone, without arguments and results."""
    lists = schedule.tasks(num_microbatches)
    group_of = {task.stage: group for group, tasks in enumerate(lists) for task in tasks}
    tags: dict[tuple[int, int], int] = {}
    sent = {}  # the tag of each message, by the task that sends it
    for group, tasks in enumerate(lists):
        for task in tasks:
            receiver = group_of.get(task.stage + (1 if task.kind == "fwd" else -1), group)
            if receiver != group:
                sent[task] = tags.get((group, receiver), 0)
                tags[group, receiver] = sent[task] + 1
    programs = [
        GroupProgram(
            group, tuple(step for task in tasks for step in _instructions(task, group, group_of, sent))
        )
        for group, tasks in enumerate(lists)
    ]
    return Plan(
        programs=tuple(programs),
        executables=tuple(
            _executable(kind, stage, group_of) for stage in group_of for kind in ("fwd", "bwd")
        ),
        inputs=(),
        constants=(),
        outputs=(),
        loops=(LoopStages(schedule.name, 0, len(group_of), num_microbatches),),
    )


def _executable(kind: str, stage: int, group_of: dict[int, int]) -> Executable:
    inputs = (stage > 0) if kind == "fwd" else 1 + (stage + 1 in group_of)
    outputs = 1 + (stage + 1 in group_of) if kind == "fwd" else int(stage > 0)
    return Executable(
        f"{kind}_{stage}", (VALUE,) * inputs, (VALUE,) * outputs, (), (None,) * inputs, (None,) * outputs
    )


def _instructions(
    task: Task, group: int, group_of: dict[int, int], sent: dict[Task, int]
) -> list[Instruction]:
    stage, microbatch = task.stage, task.microbatch
    residual = f"residual_{stage}__{microbatch}"
    forward = task.kind == "fwd"
    source = Task(task.kind, stage - 1 if forward else stage + 1, microbatch)
    receives = source.stage in group_of
    received = (_value(source),) if receives else ()
    sends = (stage + 1 in group_of) if forward else stage > 0
    outputs = ((_value(task),) if sends else ()) + ((residual,) if forward else ())
    inputs = received if forward else (*received, residual)
    steps: list[Instruction] = []
    if receives and group_of[source.stage] != group:
        steps.append(Recv(received, group_of[source.stage], sent[source]))
    steps.append(Run(task, f"{task.kind}_{stage}", inputs, outputs))
    if task in sent:
        steps.append(Send((_value(task),), group_of[stage + (1 if forward else -1)], sent[task]))
        steps.append(Free((_value(task),)))
    return [*steps, Free(inputs)] if inputs else steps


def _value(task: Task) -> str:
    return f"{'activation' if task.kind == 'fwd' else 'gradient'}_{task.stage}__{task.microbatch}"
