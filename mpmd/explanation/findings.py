"""Facts of a plan that its user probably did not intend, as text."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from mpmd.compiler.jaxprs.cost import is_exact
from mpmd.compiler.jaxprs.equations import operands, size
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.jaxprs.work import nbytes
from mpmd.explanation.tasks import TaskSummary
from mpmd.explanation.traffic import EdgeTraffic
from mpmd.explanation.uses import groups_text
from mpmd.explanation.work import Jaxprs
from mpmd.ir.plan import OutsideTask, Plan, Recv
from mpmd.util.tables import first_few, human_bytes

_GATHERED = 0.1
"""A loop gathers the arrays of other groups if they are at least this share of the bytes that it reads."""

_APART = (
    "what it computes, or how often, depends on arrays of several groups together, or it calls back into "
    "Python. Write a loop for each array, such as jax.tree.map(lambda a: jax.lax.fori_loop(0, 3, body, a), "
    "arrays), or, where each iteration needs all arrays, as for a norm of all, a Python loop of a fixed "
    "number of iterations, whose equations run where their arrays are"
)


def groups_without_backward(tasks: Sequence[TaskSummary]) -> Iterator[str]:
    forward = {task.mpmd_idx for task in tasks if "fwd_" in task.task}
    backward = {task.mpmd_idx for task in tasks if "bwd" in task.task and task.operations}
    if backward and (without := sorted(forward - backward)):
        run, have = ("runs", "it has") if len(without) == 1 else ("run", "they have")
        yield (
            f"{groups_text(without)} {run} no backward, as nothing that the gradients are of is computed "
            f"there: {have} nothing to do while others run theirs. If the layers are frozen, have more of "
            "them there"
        )


def values_sent_again(edges: Sequence[EdgeTraffic]) -> Iterator[str]:
    edges_of_value: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for edge in edges:
        for value in edge.values:
            if value.is_repeated:
                lines = first_few(map(str, value.made_by.lines)) if value.made_by else ""
                each = human_bytes(value.nbytes // value.count)
                where = f" at {lines}" if lines else ""
                edges_of_value[f"{value.aval} ({each}{where}), {value.count} times"].append(
                    (edge.src, edge.dst)
                )
    for text, of_edges in edges_of_value.items():
        between = ", ".join(f"{src} to {dst}" for src, dst in of_edges)
        yield (
            f"the same value is sent in every microbatch, {text}, from group {between}: it does not depend "
            "on the microbatch. Compute it before treduce, or in the stage that reads it, instead of passing "
            "it through mark_stage_end"
        )


def gathering_loops(plan: Plan, jaxprs: Jaxprs) -> Iterator[str]:
    for program in plan.programs:
        received = {name for step in program.instructions if isinstance(step, Recv) for name in step.values}
        for run in program.runs:
            if not isinstance(run.task, OutsideTask):
                continue
            jaxpr = jaxprs[program.mpmd_idx, run.task]
            inputs = zip(jaxpr.invars, run.inputs, strict=True)
            origins = {var: {var} for var, name in inputs if name in received and size(var) > 1}
            for eqn in jaxpr.eqns:
                gathered = set().union(*(origins.get(var, ()) for var in operands(eqn)))
                if is_exact(eqn):
                    origins.update(dict.fromkeys(eqn.outvars, gathered))
                count = sum(map(nbytes, gathered))
                if eqn.primitive.name in ("scan", "while") and count > _GATHERED * sum(
                    map(nbytes, operands(eqn))
                ):
                    yield (
                        f"the loop at {where(eqn)} runs on group {program.mpmd_idx} alone, and other groups "
                        f"send {human_bytes(count)} there for it in every step: {_APART}"
                    )
