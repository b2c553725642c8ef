"""Plans of pipelines, written from a schedule without a model: for whatever reads plans and runs nothing."""

from __future__ import annotations

import collections

from mpmd.compiler.lower.liveness import add_frees_and_donations
from mpmd.ir.plan import (
    Aval,
    Executable,
    GroupProgram,
    InputLeaf,
    LoopStages,
    OutputLeaf,
    OutsideTask,
    Plan,
    Recv,
    Run,
    Send,
    Task,
    parse_task,
)
from mpmd.schedules import Schedule, total_order

WEIGHT = Aval((4, 4), "float32", 4)
ACTIVATION = Aval((2, 4), "float32", 4)


def run_of(label: str, executable: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Run:
    """A run of the task that prints as ``label``."""
    return Run(parse_task(label), executable, inputs, outputs)


def executable(name, inputs, outputs, donated=()):
    specs = ((),) * len(inputs), ((),) * len(outputs)
    return Executable(name, tuple(inputs), tuple(outputs), donated, *specs)


EXECUTABLES = (
    executable("fwd", [WEIGHT, ACTIVATION], [ACTIVATION]),
    executable("bwd", [WEIGHT, WEIGHT, ACTIVATION, ACTIVATION], [WEIGHT, ACTIVATION]),
    executable("bwdA", [WEIGHT, ACTIVATION, ACTIVATION], [ACTIVATION]),
    executable("bwdW", [WEIGHT, ACTIVATION, ACTIVATION], [WEIGHT]),
    executable("zero", [], [WEIGHT]),
    executable("descend", [WEIGHT, WEIGHT], [WEIGHT]),
)


def sent_values(plan: Plan, *mpmd_idxs: int) -> list[Aval]:
    """What the messages of a plan carry: those of all groups, or of these."""
    programs = [plan.programs[i] for i in mpmd_idxs] or plan.programs
    sends = [i for program in programs for i in program.instructions if isinstance(i, Send)]
    return [plan.avals()[name] for send in sends for name in send.values]


def pipeline_plan(schedule: Schedule, num_microbatches: int) -> Plan:
    """A step in which each stage has a weight, turns ``h<s>@<m>`` into ``h<s+1>@<m>``, and ``d<s+1>`` back.

    The last stage's backward takes its activation for a gradient; the weights are donated and returned.
    """
    tasks = schedule.tasks(num_microbatches)
    groups = {task.stage: group for group, cells in enumerate(tasks) for cell in cells for task in cell.tasks}
    programs: list[list] = [[] for _ in tasks]
    tags: collections.Counter = collections.Counter()
    gradients = {stage: f"g{stage}" for stage in groups}

    def send(name, src, stage):
        if stage in groups and groups[stage] != src:
            edge = src, groups[stage]
            programs[src].append(Send((name,), edge[1], tags[edge]))
            programs[edge[1]].append(Recv((name,), src, tags[edge]))
            tags[edge] += 1

    def run(task: Task) -> None:
        s, m = task.stage, task.microbatch
        before, after = f"h{s}@{m}", f"h{s + 1}@{m}"
        gradient = f"d{s + 1}@{m}" if s + 1 in groups else after
        weights = f"w{s}", gradients[s]
        if task.kind in ("bwd", "bwdW"):
            gradients[s] = f"g{s}@{m}"
        inputs, outputs = {
            "fwd": ((f"w{s}", before), (after,)),
            "bwd": ((*weights, before, gradient), (gradients[s], f"d{s}@{m}")),
            "bwdA": ((f"w{s}", before, gradient), (f"d{s}@{m}",)),
            "bwdW": ((weights[1], before, gradient), (gradients[s],)),
        }[task.kind]
        programs[groups[s]].append(Run(task, task.kind, inputs, outputs))
        if task.kind == "fwd":
            send(after, groups[s], s + 1)
        elif task.kind != "bwdW":
            send(f"d{s}@{m}", groups[s], s - 1)

    for stage, group in groups.items():
        programs[group].append(Run(OutsideTask("before", 0), "zero", (), (f"g{stage}",)))
    for _, cell in total_order(tasks):
        for task in cell.tasks:
            run(task)
    for stage, group in groups.items():
        programs[group].append(
            Run(OutsideTask("after", 0), "descend", (f"w{stage}", gradients[stage]), (f"v{stage}",))
        )
    weights = [InputLeaf(f"w{s}", f"w{s}", WEIGHT, (g,), (), True) for s, g in groups.items()]
    used = {i.executable for program in programs for i in program if isinstance(i, Run)}
    batch = [f"h0@{m}" for m in range(num_microbatches)]
    return add_frees_and_donations(
        Plan(
            tuple(GroupProgram(i, tuple(program)) for i, program in enumerate(programs)),
            tuple(e for e in EXECUTABLES if e.name in used),
            (*weights, *(InputLeaf(n, n, ACTIVATION, (groups[0],), (), False) for n in batch)),
            (),
            tuple(OutputLeaf(f"w{s}", f"v{s}", WEIGHT, (g,), ()) for s, g in groups.items()),
            loops=(LoopStages(schedule.name, 0, schedule.num_stages, num_microbatches, (), schedule.slices),),
        )
    )
