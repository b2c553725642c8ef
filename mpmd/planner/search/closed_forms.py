"""Closed forms of the time and memory of schedules, for equal stages.

Each form takes the numbers of groups ``p``, stages per group ``v`` and microbatches ``m``, as arrays of one
shape. The classes of the schedules name the sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from mpmd.planner.search.families import GPIPE_OF_SLICES, SLICED
from mpmd.schedules.base import OneStagePerGroup, RoundRobin, VShaped
from mpmd.schedules.families import FAMILIES

Array = np.ndarray
Form = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """The closed forms of a family, for stages whose forward takes a third of forward and backward.

    Attributes:
      fill: the time of filling and draining, in the time of all stages of a group for one microbatch.
      in_flight: the most microbatches whose residuals a group holds, all stages of the group counted as one:
        the mean of the first and the last group.
      split: whether a backward is two tasks.
    """

    fill: Form
    in_flight: Form
    split: bool = False


def _interleaved_fill(p: Array, v: Array, m: Array) -> Array:
    return np.where(m >= p, (p - 1) / v, (m + v * p - 1) / v - m)


def _first_round(p: Array, m: Array) -> Array:
    return np.ceil(m / np.maximum(1, m // p))


def _interleaved_in_flight(of_last: int) -> Form:
    """The form of a schedule whose last group holds ``of_last`` stages of one microbatch beside its first
    round."""

    def in_flight(p: Array, v: Array, m: Array) -> Array:
        last = (v - 1) * _first_round(p, m) + of_last
        return (last + np.minimum(v * m - last, 2 * (p - 1)) / 2) / v

    return in_flight


def _zero_bubble_fill(p: Array, v: Array, m: Array) -> Array:
    return np.where(m >= p, (p - 1) / 3, (2 * m + 2 * p - 1) / 3 - m)


def _zero_bubble_v(p: Array, v: Array, m: Array) -> Array:
    return np.where(m >= p, (p - 1) / 6, (4 * p + 2 * m - 1 + np.maximum(0, 2 * m - p)) / 6 - m)


def _or_v_shaped(form: Form, limit: Callable[[Array], Array]) -> Form:
    """Replaces ``form`` with the form of ``ZeroBubbleV`` where few microbatches keep ``ZeroBubbleV`` within
    the memory ``limit``."""
    return lambda p, v, m: np.where(2 * np.minimum(p, m) <= limit(p), _zero_bubble_v(p, v, m), form(p, v, m))


def _half(p: Array) -> Array:
    return 2 * ((p + 2) // 2)


def _third(p: Array) -> Array:
    return 2 * ((p + 4) // 3)


CLOSED_FORMS: Mapping[str, ClosedForm] = {
    "GPipe": ClosedForm(lambda p, v, m: p - 1, lambda p, v, m: m),
    "Std1F1B": ClosedForm(lambda p, v, m: p - 1, lambda p, v, m: (np.minimum(p, m) + 1) / 2),
    "Eager1F1B": ClosedForm(lambda p, v, m: p - 1, lambda p, v, m: (np.minimum(2 * p - 1, m) + 1) / 2),
    "ZeroBubble": ClosedForm(_zero_bubble_fill, lambda p, v, m: np.minimum(p, m), split=True),
    "ZeroBubbleH2": ClosedForm(_zero_bubble_fill, lambda p, v, m: np.minimum(2 * p - 1, m), split=True),
    "InterleavedGPipe": ClosedForm(_interleaved_fill, lambda p, v, m: m),
    "LoopedBFS": ClosedForm(_interleaved_fill, lambda p, v, m: m),
    "Interleaved1F1B": ClosedForm(_interleaved_fill, _interleaved_in_flight(1)),
    "KimiK2": ClosedForm(_interleaved_fill, _interleaved_in_flight(2)),
    "InterleavedZeroBubble": ClosedForm(
        lambda p, v, m: np.where(
            m >= p,
            (p - 1) / (3 * v),
            (2 * v * p + 2 * m - 1 + (v - 1) * np.maximum(0, 2 * m - p)) / (3 * v) - m,
        ),
        lambda p, v, m: np.minimum(v * m, (v - 1) * _first_round(p, m) + p) / v,
        split=True,
    ),
    "ZeroBubbleV": ClosedForm(_zero_bubble_v, lambda p, v, m: np.minimum(p, m), split=True),
    "VHalf": ClosedForm(
        _or_v_shaped(lambda p, v, m: (3 * p - 3 - p % 2) / 6, _half),
        lambda p, v, m: np.minimum(np.minimum(p, m), _half(p) / 2),
        split=True,
    ),
    "VMin": ClosedForm(
        _or_v_shaped(lambda p, v, m: (4 * p - 5 + 2 * (p % 3 == 0)) / 6, _third),
        lambda p, v, m: np.minimum(np.minimum(p, m), _third(p) / 2),
        split=True,
    ),
    "DualPipeV": ClosedForm(
        lambda p, v, m: np.where(m >= 2 * p, (p - 1) / 3, _zero_bubble_v(p, v, m)),
        lambda p, v, m: np.where(m >= 2 * p, np.minimum(m, p + 0.5), np.minimum(p, m)),
        split=True,
    ),
    "ForwardOnly": ClosedForm(_interleaved_fill, lambda p, v, m: 0 * m),
}
"""The closed forms by the name of the family; ``ListSchedule`` has none."""


def closed_form(name: str, slices: int) -> ClosedForm:
    """Returns the closed forms of a family, or the forms of ``GPipe`` for a family without closed forms.

    Args:
      slices: number of slices of a microbatch; read only for families of slices.
    """
    if name not in SLICED:
        return CLOSED_FORMS.get(name, CLOSED_FORMS["GPipe"])
    if name == GPIPE_OF_SLICES:
        return ClosedForm(lambda p, v, m: (p - 1) / slices, lambda p, v, m: m)
    hops = 1 + ("eager" in name)
    split = "split" in name

    def in_flight(p: Array, v: Array, m: Array) -> Array:
        of_one_stage = (slices + hops * (p - 1)) / slices
        of_several = 1 + (2 * (p - 1) + hops - 1) / (v * slices)
        first = np.minimum(m, np.where(v > 1, of_several, of_one_stage))
        if not split:
            return (first + np.minimum(m, 1)) / 2
        # Gradients of weights, which the last group delays most, keep residuals.
        return (first + np.where(v > 1, first, np.minimum(m, (slices + p - 1) / slices))) / 2

    return ClosedForm(lambda p, v, m: (p - 1) / ((3 if split else 1) * v * slices), in_flight, split)


def takes(name: str, stages_per_group: int) -> bool:
    """Whether a family is searched with ``stages_per_group`` stages on each group.

    With one stage on each group, a schedule for several stages equals a schedule for a single stage, and
    the search tries only the latter.
    """
    if name in SLICED:
        return stages_per_group == 1 or name != GPIPE_OF_SLICES
    schedule = FAMILIES[name].schedule
    if issubclass(schedule, VShaped):
        return stages_per_group == 2
    if issubclass(schedule, RoundRobin):
        return stages_per_group > 1
    return stages_per_group == 1 or not issubclass(schedule, OneStagePerGroup)
