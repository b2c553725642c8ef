"""The time that the formulas predict to be saved by slices of sequences, for a loss that is written without
slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.reasons import AS_FAST
from mpmd.planner.search.formula import PricedCandidate, evaluate
from mpmd.planner.search.stages import CostModel
from mpmd.schedules import Seq1F1B
from mpmd.util.tables import human_bytes

NUMBERS = (2, 4, 8)
"""The numbers of slices that are tried."""

MOST_ROWS = 4
"""The number of the best candidates with several groups that are tried with slices."""


def advice_on_slices(profile: LayerProfile, cluster: AnyCluster, rows: Iterable[Row]) -> str:
    """A line on the best schedule of slices; empty where none makes the step shorter than the best row.

    Slices of equal work are assumed, and that a token reads only those before it. Both steps are
    priced by the formulas.

    Args:
      profile: of the step's only loop.
      rows: the candidates, the best first.
    """
    model, (best, *others) = CostModel(profile, cluster), rows
    base = evaluate(model, best.candidate)
    pipelines = [row.candidate for row in (best, *others) if len(row.candidate.submeshes) > 1][:MOST_ROWS]
    sliced = (evaluation for candidate in pipelines for evaluation in _with_slices(model, candidate))
    fitting = (e for e in sliced if e.missing_bytes(cluster) <= 0)
    shortest = min(fitting, key=lambda evaluation: evaluation.seconds, default=None)
    if shortest is None or AS_FAST * shortest.seconds > base.seconds:
        return ""
    return _text(base, shortest)


def _with_slices(model: CostModel, candidate: Candidate) -> Iterator[PricedCandidate]:
    stages, groups = candidate.schedule.num_stages, candidate.schedule.mpmd_dim
    if stages % groups or not model.profile.has_backward or model.profile.slices > 1:
        return
    for slices in NUMBERS:
        if model.profile.length % slices == 0:
            schedule = Seq1F1B(stages, slices, groups)
            yield evaluate(model, dataclasses.replace(candidate, schedule=schedule))


def _text(base: PricedCandidate, sliced: PricedCandidate) -> str:
    one, other = base.prediction, sliced.prediction
    return (
        f"{sliced.candidate.schedule_text} would take {other.seconds / one.seconds:.2f} times as long by the "
        f"formulas, bubble {other.bubble:.0%} in place of {one.bubble:.0%}, activations "
        f"{human_bytes(other.memory.residuals)} in place of {human_bytes(one.memory.residuals)}: if each "
        "token reads only those before it, write the loss over slices as docs/long_sequences.md does"
    )
