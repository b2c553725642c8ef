"""Texts about a plan: likely mistakes of its user, and discrete choices that are kept or made again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import Jaxpr

from mpmd.compiler.jaxprs.choices import KEPT, MOST, RECOMPUTED, choice_bytes, choice_name
from mpmd.compiler.jaxprs.cost import is_exact
from mpmd.compiler.jaxprs.equations import all_eqns, operands, size
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.jaxprs.work import nbytes
from mpmd.explanation.provenance import lines_of
from mpmd.explanation.tasks import TaskSummary
from mpmd.explanation.traffic import EdgeTraffic, SentValue
from mpmd.explanation.uses import groups_text
from mpmd.explanation.work import Jaxprs
from mpmd.ir.plan import OutsideTask, Plan
from mpmd.util.grouping import grouped
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
    edges_of_value = grouped(
        (_repeated_text(value), edge) for edge in edges for value in edge.values if value.is_repeated
    )
    for text, of_edges in edges_of_value.items():
        between = ", ".join(f"{edge.src} to {edge.dst}" for edge in of_edges)
        yield (
            f"the same value is sent in every microbatch, {text}, from group {between}: it does not depend "
            "on the microbatch. Compute it before treduce, or in the stage that reads it, instead of passing "
            "it through mark_stage_end"
        )


def _repeated_text(value: SentValue) -> str:
    lines = first_few(map(str, value.made_by.lines)) if value.made_by else ""
    at = f" at {lines}" if lines else ""
    return f"{value.aval} ({human_bytes(value.nbytes // value.count)}{at}), {value.count} times"


def gathering_loops(plan: Plan, jaxprs: Jaxprs) -> Iterator[str]:
    for program in plan.programs:
        received = program.received
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


def kept_choices(jaxprs: Mapping[str, Jaxpr]) -> Iterator[str]:
    for task, memory, lines in _choices(jaxprs, KEPT):
        yield (
            f"{task} keeps {memory} of discrete choices, such as the indices of top_k, so that its backward "
            f"makes no others when it computes a function under jax.checkpoint again: {lines}"
        )


def recomputed_choices(jaxprs: Mapping[str, Jaxpr]) -> Iterator[str]:
    for task, memory, lines in _choices(jaxprs, RECOMPUTED):
        yield (
            f"the backward of {task} makes {memory} of discrete choices again, which may differ from the "
            f"forward's by rounding: {lines}. They are more than {MOST:.0%} of the bytes that their function "
            "under jax.checkpoint returns: put jax.checkpoint around a whole layer, or have its policy keep "
            "them by a name of jax.ad_checkpoint.checkpoint_name"
        )


def _choices(jaxprs: Mapping[str, Jaxpr], name: str) -> Iterator[tuple[str, str, str]]:
    """Yields the forwards with choices of a name, the bytes of the choices, and the user's lines."""
    for task, jaxpr in jaxprs.items():
        if "fwd_" in task and (count := choice_bytes(jaxpr, name)):
            named = (eqn for eqn in all_eqns(jaxpr.eqns) if choice_name(eqn) == name)
            lines = dict.fromkeys(str(line) for eqn in named for line in lines_of(eqn))
            yield task, human_bytes(count), first_few(lines)
