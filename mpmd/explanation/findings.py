"""What of a plan is probably not as its user meant it, as text."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from mpmd.explanation.tasks import TaskSummary
from mpmd.explanation.traffic import EdgeTraffic
from mpmd.explanation.uses import groups_text
from mpmd.util.tables import first_few, human_bytes


def groups_without_backward(tasks: Sequence[TaskSummary]) -> Iterator[str]:
    """Of groups that run forwards alone, while others run backwards."""
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
    """Of values that are sent for every microbatch, and are the same each time."""
    found: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for edge in edges:
        for value in edge.values:
            if value.is_repeated:
                lines = first_few(map(str, value.made_by.lines)) if value.made_by else ""
                each = human_bytes(value.nbytes // value.count)
                where = f" at {lines}" if lines else ""
                found[f"{value.aval} ({each}{where}), {value.count} times"].append((edge.src, edge.dst))
    for text, of_edges in found.items():
        between = ", ".join(f"{src} to {dst}" for src, dst in of_edges)
        yield (
            f"the same value is sent in every microbatch, {text}, from group {between}: it does not depend "
            "on the microbatch. Compute it before treduce, or in the stage that reads it, instead of passing "
            "it through mark_stage_end"
        )
