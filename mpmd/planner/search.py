"""Searches for the best way to run a step on a cluster.

``sweep.py`` estimates all shapes; the most promising ones are cut into stages (``candidates.py``) and
simulated (``formula.py``).
"""

from __future__ import annotations

from mpmd.planner.alternatives import alternatives
from mpmd.planner.candidate import Row
from mpmd.planner.candidates import best_of_shape
from mpmd.planner.contradictions import combined, contradictions
from mpmd.planner.fixed import Fixed
from mpmd.planner.formula import Evaluation
from mpmd.planner.hardware import Cluster
from mpmd.planner.nothing_fits import nothing_fits
from mpmd.planner.profile import Profile
from mpmd.planner.reasons import shortage, slower_because
from mpmd.planner.stages import CostModel
from mpmd.planner.sweep import Space, sweep

MOST_SHAPES = 200
"""How many shapes are cut and simulated."""

MOST_TASKS = 600_000
"""How many tasks are simulated in all, roughly."""

NUM_ROWS = 32

OPEN = Fixed()


def search(profile: Profile, cluster: Cluster, fixed: Fixed = OPEN) -> tuple[Row, ...]:
    """The best candidates, the shortest step first, and what they are compared with.

    Candidates that do not fit come last. The alternatives to a pipeline are among the rows, with labels:
    ``one device``, ``data parallel``, ``FSDP`` and ``tensor parallel``; other rows have none.

    Raises: ``ValueError`` for fixes that contradict one another, the step or the cluster, with all
      contradictions; and when nothing fits, with what is missing.
    """
    fixed = combined(fixed, profile)
    if faults := [*contradictions(fixed, profile, cluster)]:
        raise ValueError("\n".join(faults))
    space = Space(CostModel(profile, cluster), fixed)
    found = _simulated(space)
    alone = alternatives(space)
    known = {repr(evaluation.candidate) for _, evaluation in alone}
    others = [("", evaluation) for evaluation in found if repr(evaluation.candidate) not in known]
    if all(shortage(evaluation.prediction, cluster) for _, evaluation in others + alone):
        raise ValueError(nothing_fits(space))
    return _rows(others + alone, cluster)


def _simulated(space: Space) -> list[Evaluation]:
    """The best of the most promising shapes."""
    found: list[Evaluation] = []
    num_tasks = 0
    for shape in sweep(space)[:MOST_SHAPES]:
        evaluation = best_of_shape(space, shape)
        if evaluation is not None:
            found.append(evaluation)
            num_tasks += evaluation.num_tasks
        if num_tasks > MOST_TASKS:
            break
    return found


def _rows(labelled: list[tuple[str, Evaluation]], cluster: Cluster) -> tuple[Row, ...]:
    """The best first; what does not fit last."""

    def key(pair: tuple[str, Evaluation]) -> tuple[bool, float]:
        return bool(shortage(pair[1].prediction, cluster)), pair[1].seconds

    ordered = sorted(labelled, key=key)
    best = ordered[0][1]
    rows: list[Row] = []
    for label, evaluation in ordered:
        prediction = evaluation.prediction
        if label or sum(not row.label for row in rows) < NUM_ROWS:
            reason = shortage(prediction, cluster) or (
                slower_because(evaluation.candidate, prediction, best.candidate, best.prediction)
                if rows
                else ""
            )
            rows.append(Row(evaluation.candidate, prediction, label, reason))
    return tuple(rows)
