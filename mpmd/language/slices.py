"""Slices of sequences: their bounds, and the arrays cut at them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from mpmd.compat import api_boundary
from mpmd.language.decisions import note_slices
from mpmd.util.tables import first_few
from mpmd.util.tree import named_leaves
from mpmd.validation import (
    Fault,
    int_fault,
    int_faults,
    is_int,
    is_number,
    is_sequence,
    raise_faults,
    sequence_fault,
    shown,
    size_fault,
)

Tree = TypeVar("Tree")


@api_boundary
def slice_bounds(
    length: int, slices: int, *, attention_share: float = 0.0, multiple: int = 1
) -> tuple[int, ...]:
    """The bounds of slices of a sequence that take equally long.

    ::

        bounds = mpmd.slice_bounds(8192, 4)                         # (0, 2048, 4096, 6144, 8192)
        bounds = mpmd.slice_bounds(8192, 4, attention_share=0.5)    # (0, 2998, 5063, 6741, 8192)

    A token attends to all tokens before it. So its work is a constant, for weights, and a part that grows
    with its position, for attention. Equal work means shorter slices towards the end of the sequence; slices
    of equal length make every group wait for the last slice of each microbatch. The first ``t`` of all tokens
    have the share ``(1 - a) t + a t**2`` of the work, where ``a`` is ``attention_share``.

    Args:
      length: of a sequence, in tokens.
      slices: the number of slices, as in the schedule.
      attention_share: the share of causal attention in the time of a layer on the whole sequence, from 0 to
        1. It is about ``length / (length + 12 * width)`` for a transformer of that ``width`` whose
        feed-forward layers are four times as wide. The default, 0, gives slices of equal length, and also
        fits recurrent layers, whose work is the same for each token.
      multiple: all bounds but the last are multiples of this number, as the blocks of attention kernels need.

    Returns: ``slices + 1`` positions, ascending from 0 to ``length``: slice ``k`` has the tokens from
      ``bounds[k]`` to before ``bounds[k + 1]``. Each is within half of ``multiple`` of the bound of equal
      work, unless a slice would have no token.
    Raises: ``ValueError`` when the sequence has too few tokens for the slices or a number is out of range;
      ``TypeError`` for other types than numbers.
    """
    raise_faults(
        int_fault("length", length),
        size_fault("slices", slices),
        _share_fault(attention_share),
        int_fault("multiple", multiple),
    )
    units = length // multiple
    if units < slices:
        each = f"a multiple of {multiple} tokens" if multiple > 1 else "a token"
        raise ValueError(
            f"{length} tokens cannot be cut into {slices} slices: each slice needs {each} at least"
        )
    bounds = [0]
    for k in range(1, slices):
        ideal = round(_share_of_tokens(k / slices, attention_share) * length / multiple)
        bounds.append(min(max(ideal, bounds[-1] + 1), units - (slices - k)))
    return *(int(bound * multiple) for bound in bounds), int(length)


def _share_fault(share: Any) -> Fault | None:
    text = f"attention_share must be a number from 0 to 1, not {shown(share)}"
    if not is_number(share):
        return TypeError(text)
    return None if 0 <= share <= 1 else ValueError(text)


def _share_of_tokens(work: float, attention: float) -> float:
    """The share of tokens at the start of a sequence that have a share of its work."""
    weights = 1 - attention
    return 2 * work / (weights + math.sqrt(weights**2 + 4 * attention * work))


@api_boundary
def slices(tree: Tree, bounds: Sequence[int], axis: int = 1) -> tuple[Tree, ...]:
    """Cuts arrays into slices of the sequence.

    ::

        bounds = mpmd.slice_bounds(tokens.shape[1], 4)
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            ...

    Args:
      tree: a pytree of arrays, all with the same length along ``axis``: ``(rows, length, ...)``.
      bounds: ascending positions from 0 to the length, as of ``slice_bounds``.
      axis: of the sequence; a negative one counts from the last axis.

    Returns: a pytree for each slice, with leaves of shape ``(rows, bounds[k + 1] - bounds[k], ...)``. Slices
      of a numpy array are views.
    Raises: ``ValueError`` for bounds that do not ascend from 0 to the length, and for leaves without the
      axis; ``TypeError`` for leaves that are not arrays, and for bounds that are not integers.
    """
    raise_faults(int_fault("axis", axis, -math.inf), *_bounds_faults(bounds))
    _check_leaves(named_leaves("tree", tree), bounds[-1], axis)
    note_slices(len(bounds) - 1)
    return tuple(
        jax.tree.map(functools.partial(_cut, start=start, stop=stop, axis=axis), tree)
        for start, stop in itertools.pairwise(map(int, bounds))
    )


def _bounds_faults(bounds: Any) -> list[Fault | None]:
    if not is_sequence(bounds):
        return [sequence_fault("bounds", bounds, "a sequence of positions, as of slice_bounds")]
    if not all(map(is_int, bounds)):
        return list(int_faults("bounds", bounds, 0))
    if len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in itertools.pairwise(bounds)):
        return [ValueError(f"bounds must be two or more ascending positions from 0 on, not {shown(bounds)}")]
    return []


def _check_leaves(named: Sequence[tuple[str, Any]], length: int, axis: int) -> None:
    if not named:
        raise ValueError("the tree has no array to cut into slices")
    if other := [f"{path} is of type {type(leaf).__name__}" for path, leaf in named if not _is_array(leaf)]:
        raise TypeError(f"{first_few(other, 5)}: only arrays are cut into slices")
    texts = [(f"{path} has shape {tuple(leaf.shape)}", leaf.shape) for path, leaf in named]
    if without := [text for text, shape in texts if not -len(shape) <= axis < len(shape)]:
        raise ValueError(f"{first_few(without, 5)}: there is no axis {axis} to cut into slices")
    if wrong := [text for text, shape in texts if shape[axis] != length]:
        raise ValueError(
            f"{first_few(wrong, 5)}: bounds that end at {length} need {length} positions along axis {axis}"
        )


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _cut(leaf: Any, start: int, stop: int, axis: int) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf[(slice(None),) * (axis % leaf.ndim) + (slice(start, stop),)]
    return jax.lax.slice_in_dim(leaf, start, stop, axis=axis)
