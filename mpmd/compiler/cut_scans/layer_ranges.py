"""Notes where an array is cut into layer ranges: the identity, which differentiation keeps on gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


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


layers_p = Primitive("layers")
"""Parameters: ``axis``; ``sizes`` of the layer ranges along it; ``scan``: a ``MarkedScan`` over the array."""


def in_ranges(x: Any, sizes: Sequence[int], scan: MarkedScan | None = None) -> Any:
    return layers_p.bind(x, axis=0, sizes=tuple(sizes), scan=scan)


def _transpose(ct, x, *, axis, sizes, scan):
    return [ct if type(ct) is ad.Zero else layers_p.bind(ct, axis=axis, sizes=sizes, scan=None)]


def _batch(args, dims, *, axis, sizes, scan):
    (x,), (dim,) = args, dims
    return layers_p.bind(x, axis=axis + (dim <= axis), sizes=sizes, scan=scan), dim


layers_p.def_impl(lambda x, **params: x)
layers_p.def_abstract_eval(lambda x, **params: x)
ad.deflinear2(layers_p, _transpose)
batching.primitive_batchers[layers_p] = _batch
mlir.register_lowering(layers_p, lambda ctx, x, **params: [x])
