"""The order of candidates that are as fast as each other: the simplest is the best. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpmd.planner.candidate import Candidate, Prediction
from mpmd.schedules import ForwardOnly, GPipe, Interleaved1F1B, Std1F1B

KNOWN_SCHEDULES = (GPipe, Std1F1B, Interleaved1F1B, ForwardOnly)
"""The schedules that pipelines are usually run with. Other schedules have more tasks, messages or
values in flight, whose costs no prediction knows well."""

AS_FAST = 1.01
"""Steps whose times differ by less are as fast: no prediction is more exact."""


class TimedCandidate(NamedTuple):
    """A candidate with its time, from formulas, a plan or a measurement.

    Attributes:
      seconds: seconds of a step.
      expected_error: expected relative error of ``seconds``.
      size: the number of the candidate's tasks and messages, in any unit.
    """

    candidate: Candidate
    seconds: float
    expected_error: float
    size: float


def in_order(options: Sequence[TimedCandidate]) -> list[int]:
    """The positions of the options that may be the fastest, the preferred one first, then the simplest.

    Among the simplest, an option with fewer tasks and messages precedes an option that is faster by less
    than ``AS_FAST``: each task and message takes time that no prediction knows.

    Args:
      options: at least one.
    """
    fastest = min(option.seconds for option in options)
    equal = [
        i for i, option in enumerate(options) if _is_within(option.seconds, option.expected_error, fastest)
    ]
    kinds = {i: complexity(options[i].candidate) for i in equal}
    equal.sort(key=lambda i: (kinds[i], options[i].seconds))
    simplest = [i for i in equal if kinds[i] == kinds[equal[0]]]
    limit = AS_FAST * options[simplest[0]].seconds
    best = min((i for i in simplest if options[i].seconds <= limit), key=lambda i: options[i].size)
    return [best, *(i for i in equal if i != best)]


class Complexity(NamedTuple):
    """The features that make a candidate less simple, in order of weight.

    Attributes:
      pipeline: whether there is more than one group. Messages between groups, and the runtime that orders
        them, take time that no prediction knows.
      unequal_groups: whether groups differ in their devices.
      unusual_schedule: whether a loop has a schedule that few pipelines run with.
      shared_layers: whether devices share layers. The times of exchanges within each layer are known less
        well than the times of exchanges of gradients.
      several_policies: whether stages differ in their policies.
      sequence_parallel: whether values between layers that devices share are divided, too.
    """

    pipeline: bool
    unequal_groups: bool
    unusual_schedule: bool
    shared_layers: bool
    several_policies: bool
    sequence_parallel: bool


def complexity(candidate: Candidate) -> Complexity:
    """Compares candidates by simplicity: the simplest candidate has the least value."""
    unusual = any(
        len(loop.submeshes) > 1
        and (not isinstance(loop.schedule, KNOWN_SCHEDULES) or loop.schedule.slices > 1)
        for loop in candidate.loops
    )
    shared = any(submesh.model * submesh.sequence > 1 for submesh in candidate.submeshes)
    have_policies = any(len(loop.remat) > 1 for loop in candidate.loops)
    pipeline, unequal = len(candidate.submeshes) > 1, len(set(candidate.submeshes)) > 1
    return Complexity(pipeline, unequal, unusual, shared, have_policies, candidate.sequence_parallel)


def may_be_as_fast(prediction: Prediction, fastest: Prediction) -> bool:
    """Whether the time of the fastest is within the error that is expected of a prediction."""
    return _is_within(prediction.seconds, prediction.expected_error, fastest.seconds)


def _is_within(seconds: float, expected_error: float, fastest: float) -> bool:
    return seconds * (1 - expected_error) <= fastest


def less_simple_because(candidate: Candidate, best: Candidate) -> str:
    """The first feature that makes a candidate less simple than the best, as text; empty without one."""
    pairs = zip(complexity(candidate), complexity(best), strict=True)
    names = ", ".join(dict.fromkeys(loop.schedule_text for loop in candidate.loops))
    texts = (
        "a pipeline is less simple",
        "its groups differ",
        f"{names} is less usual",
        "devices share its layers",
        "its stages have different policies",
        "it divides norms and residuals, too",
    )
    return next((text for text, (here, there) in zip(texts, pairs, strict=True) if here and not there), "")
