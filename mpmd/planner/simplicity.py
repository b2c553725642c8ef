"""The order of candidates that are as fast as each other: the simplest is the best. No JAX."""

from __future__ import annotations

from mpmd.planner.candidate import Candidate, Prediction
from mpmd.schedules import ForwardOnly, GPipe, Interleaved1F1B, Std1F1B

KNOWN_SCHEDULES = (GPipe, Std1F1B, Interleaved1F1B, ForwardOnly)
"""The schedules that pipelines are usually run with. Others have more tasks, messages or values in flight,
whose costs no prediction knows well."""


def complexity(candidate: Candidate) -> tuple[bool, bool, bool, bool]:
    """The ways in which a candidate is less simple than others, those that count most first.

    They are unequal groups, a schedule that few pipelines run with, different policies of stages, and
    sequence parallelism.
    """
    unusual = any(
        len(loop.submeshes) > 1
        and (not isinstance(loop.schedule, KNOWN_SCHEDULES) or loop.schedule.slices > 1)
        for loop in candidate.loops
    )
    have_policies = any(len(loop.remat) > 1 for loop in candidate.loops)
    return len(set(candidate.submeshes)) > 1, unusual, have_policies, candidate.sequence_parallel


def may_be_as_fast(prediction: Prediction, fastest: Prediction) -> bool:
    """Whether the time of the fastest is within the error that is expected of a prediction."""
    return prediction.seconds * (1 - prediction.expected_error) <= fastest.seconds


def less_simple_because(candidate: Candidate, best: Candidate) -> str:
    """The reason why a candidate is less simple than the best; empty if it is not."""
    pairs = zip(complexity(candidate), complexity(best), strict=True)
    names = ", ".join(dict.fromkeys(loop.schedule_text for loop in candidate.loops))
    texts = (
        "its groups differ",
        f"{names} is less usual",
        "its stages have different policies",
        "it divides norms and residuals, too",
    )
    return next((text for text, (here, there) in zip(texts, pairs, strict=True) if here and not there), "")
