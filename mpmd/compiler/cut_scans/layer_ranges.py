"""Notes where an array is cut into layer ranges: the identity, which differentiation keeps on gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.interpreters import ad, batching

from mpmd.language.identities import bind_to_tangents, identity


@dataclasses.dataclass(frozen=True, eq=False)
class MarkedScan:
    """A scan that is cut at the user's marks, on the arrays that it scans over.

    Attributes:
      mark: the line of a mark in its body.
      index_fault: the error if the array numbers layers, because the body takes rows of another array by
        these numbers.
    """

    mark: str
    index_fault: str | None = None


layers_p = identity("layers")
"""Takes one array. Parameters: ``axis``; ``sizes`` of layer ranges; ``scan``: a ``MarkedScan`` over it."""


def in_ranges(x: Any, sizes: Sequence[int], scan: MarkedScan | None = None) -> Any:
    return layers_p.bind(x, axis=0, sizes=tuple(sizes), scan=scan)[0]


def _transpose(cotangents, x, *, scan, **params):
    return bind_to_tangents(layers_p, cotangents, scan=None, **params)


def _batch(args, dims, *, axis, **params):
    return layers_p.bind(*args, axis=axis + (dims[0] <= axis), **params), dims


ad.deflinear2(layers_p, _transpose)
batching.primitive_batchers[layers_p] = _batch
