"""Decides whether two results are the same but for rounding."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpmd.checking.perturb import eps_of
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import table

_FACTOR = 8
"""The largest difference of a result from the reference, as a multiple of the reference's own movement."""

_SUMS = 32
"""The difference that is always allowed, in roundings of a leaf's typical number: sums round in any order."""

_SHOWN = 10

_ONE_IN = 100_000
"""One in 100,000 elements may differ: the sign of a gradient that is nearly zero is arbitrary."""


class Verdict(enum.StrEnum):
    """The outcome of the comparison of a leaf."""

    EQUAL = "equal"
    """Bit by bit."""
    CLOSE = "to rounding"
    """The difference is one that rounding can make."""
    ROUNDING = "rounding alone"
    """Rounding makes the numbers themselves, in the reference too, so comparing them says nothing.

    An example is the bias of keys under Adam, whose true gradient is zero: Adam scales rounding errors up.
    """
    DIFFERS = "DIFFERS"
    """The difference is larger."""


@dataclasses.dataclass(frozen=True)
class LeafCheck:
    """The comparison of one leaf of the result, over all steps.

    Attributes:
      path: such as ``result[0]['w']``.
      difference: the largest difference to the reference.
      rounding: the largest difference of the reference to itself, when its arguments are moved by rounding.
      change: the largest number; of state that the step updates, the largest change since the first step.
      differing: the number of elements that differ by more than rounding can make them.
      decided_by_rounding: the part of the elements that rounding can move by as much as they are.
    """

    path: str
    difference: float
    rounding: float
    change: float
    differing: int
    decided_by_rounding: float
    verdict: Verdict


@dataclasses.dataclass(frozen=True, repr=False)
class Check(ShownAsText):
    """The result of ``mpmd.check``; ``str(check)`` is a table of the worst ten leaves, ``text()`` of all.

    Attributes:
      leaves: the comparison of each leaf of the result.
      steps: the number of steps that were compared.
    """

    leaves: tuple[LeafCheck, ...]
    steps: int

    @property
    def ok(self) -> bool:
        """Whether no leaf differs by more than rounding can make it."""
        return not self.differing

    @property
    def differing(self) -> tuple[LeafCheck, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.verdict is Verdict.DIFFERS)

    @property
    def worst(self) -> tuple[LeafCheck, ...]:
        """The leaves in order, the worst first: by verdict, then by the difference relative to the change."""
        return tuple(sorted(self.leaves, key=_badness, reverse=True))

    def text(self) -> str:
        """The table of all leaves, in the order of the result."""
        return f"{_table(self.leaves)}\n{self._summary()}"

    def __str__(self) -> str:
        if len(self.leaves) <= _SHOWN:
            return self.text()
        count = len(self.leaves) - _SHOWN
        rest = f"{count} leaves more are no worse; check.text() has all"
        return f"{_table(self.worst[:_SHOWN])}\n{rest}\n{self._summary()}"

    def _summary(self) -> str:
        summary = (
            f"{len(self.differing)} of {len(self.leaves)} leaves differ"
            if self.differing
            else "no leaf differs"
        )
        return f"{summary} by more than rounding in {self.steps} steps"


def _badness(leaf: LeafCheck) -> tuple[int, float]:
    relative = leaf.difference / leaf.change if leaf.change else math.inf if leaf.difference else 0.0
    return list(Verdict).index(leaf.verdict), relative


def _table(leaves: Sequence[LeafCheck]) -> str:
    header = ("leaf", "difference", "rounding", "change", "decided by rounding", "")
    rows = [
        (
            leaf.path,
            f"{leaf.difference:.1e}",
            f"{leaf.rounding:.1e}",
            f"{leaf.change:.1e}",
            f"{leaf.decided_by_rounding:.0%}",
            str(leaf.verdict),
        )
        for leaf in leaves
    ]
    return table(header, rows)


def judge(
    path: str,
    before: Any,
    reference: Sequence[Any],
    actual: Sequence[Any],
    perturbed: Sequence[Sequence[Any]],
    rounding: float,
) -> LeafCheck:
    """Decides whether a leaf of the result differs by more than rounding can make it.

    The movement of an element is its largest difference between the reference and a perturbed reference, over
    all steps. The element may differ by ``_FACTOR`` times its movement or, if that happens to be small, by
    ``_FACTOR`` times the median movement of the leaf.

    Args:
      path: the leaf's name, such as ``result[0]['w']``.
      before: for state that is fed back, the argument that the result replaces, of the reference and then of
        each perturbed reference; else ``None``.
      reference, actual: the leaf after each step, of the reference and of the step on groups.
      perturbed: for each perturbed reference, the leaf after each step.
      rounding: the largest ``eps`` of the dtypes in which the step computes.
    """
    dtype = reference[0].dtype
    # The change of state is compared: it is small beside the numbers of the state.
    zero, *zeros = [0.0] * (1 + len(perturbed)) if before is None else map(_wide, before)
    values = [_wide(value) for value in reference]
    with np.errstate(invalid="ignore", over="ignore"):
        difference = _largest([_distance(_wide(a), b) for a, b in zip(actual, values, strict=True)])
        moved = _largest(
            [
                _distance(_wide(value) - start, of_reference - zero)
                for run, start in zip(perturbed, zeros, strict=True)
                for value, of_reference in zip(run, values, strict=True)
            ]
        )
        change = _largest([np.abs(value - zero) for value in values])
        stored = _largest([np.abs(value) for value in values])
        typical = np.sqrt(np.mean(np.square(change))) if change.size else 0.0
        allowed = _FACTOR * np.maximum(moved, np.median(moved) if moved.size else 0.0)
        if eps_of(dtype):
            allowed = allowed + 2 * eps_of(dtype) * stored
            allowed = allowed + _SUMS * max(rounding, eps_of(dtype)) * np.maximum(change, typical)
    outside = int(np.sum(difference > allowed))
    decided = float(np.mean((allowed >= change) & (moved > 0))) if change.size else 0.0
    return LeafCheck(
        path=path,
        difference=float(np.max(difference, initial=0.0)),
        rounding=float(np.max(moved, initial=0.0)),
        change=float(np.max(change, initial=0.0)),
        differing=outside,
        decided_by_rounding=decided,
        verdict=_verdict(outside, difference, decided),
    )


def _verdict(outside: int, difference: np.ndarray, decided: float) -> Verdict:
    if outside > difference.size // _ONE_IN:
        return Verdict.DIFFERS
    if not difference.any():
        return Verdict.EQUAL
    return Verdict.ROUNDING if decided > 0.5 else Verdict.CLOSE


def _distance(value: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the distance of numbers: 0 for equal infinities and two NaNs, infinite for one NaN."""
    distance = np.abs(value - other)
    alike = (value == other) | (np.isnan(value) & np.isnan(other))
    return np.where(alike, 0.0, np.where(np.isnan(distance), np.inf, distance))


def _largest(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.maximum.reduce(list(arrays))


def _wide(value: Any) -> np.ndarray:
    if hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
