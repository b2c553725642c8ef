"""Which dimensions of an equation's operands and results are one and the same.

One rule for each kind of equation. What has no rule here is computed from whole values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.axis import Axis, shape_of
from mpmd.compiler.jaxprs.batched_scans import batch_axes, batched_body
from mpmd.compiler.jaxprs.cost import is_elementwise
from mpmd.compiler.jaxprs.indexed_axes import gather_axes, gather_params, scatter_axes


def axes_of(eqn: JaxprEqn) -> list[Axis]:
    """The dimensions of an equation that have more than one element."""
    name = eqn.primitive.name
    rule = _RULES.get(name, _elementwise if is_elementwise(eqn) else None)
    return [axis for axis in rule(eqn) if _has_elements(eqn, axis)] if rule else []


def part_params(eqn: JaxprEqn, axis: Axis, size: int) -> dict[str, Any]:
    """The parameters that differ in a part of an equation, of ``size`` elements along an axis of results."""
    shape_name = _SHAPES.get(eqn.primitive.name)
    if eqn.primitive.name == "slice":
        d = axis.outs[0]
        stride = (eqn.params["strides"] or [1] * (d + 1))[d]
        limits = list(eqn.params["limit_indices"])
        limits[d] = eqn.params["start_indices"][d] + (size - 1) * stride + 1
        return {"limit_indices": tuple(limits)}
    if eqn.primitive.name == "gather":
        return gather_params(eqn, axis, size)
    if eqn.primitive.name == "scan":
        return {"jaxpr": batched_body(eqn, axis, size, axes_of, part_params)}
    if shape_name is None:
        return {}
    shape = list(eqn.params[shape_name])
    shape[axis.outs[0]] = size
    return {shape_name: tuple(shape)}


_SHAPES = {
    "broadcast_in_dim": "shape",
    "dynamic_slice": "slice_sizes",
    "iota": "shape",
    "reshape": "new_sizes",
}
"""The parameters that are shapes of the result."""


def _has_elements(eqn: JaxprEqn, axis: Axis) -> bool:
    sizes = [shape_of(eqn.invars[i])[d] for i, d in axis.ins.items()]
    sizes += [shape_of(eqn.outvars[i])[d] for i, d in axis.outs.items()]
    return min(sizes, default=1) > 1


def _elementwise(eqn: JaxprEqn, but: Collection[int] = ()) -> Iterator[Axis]:
    """All dimensions of the result. An operand without one has one element there, or is a scalar."""
    target = shape_of(eqn.outvars[0])
    full = [i for i, atom in enumerate(eqn.invars) if len(shape_of(atom)) == len(target)]
    for d, size in enumerate(target):
        if d not in but:
            along = (i for i in full if shape_of(eqn.invars[i])[d] == size)
            yield Axis(dict.fromkeys(along, d), dict.fromkeys(range(len(eqn.outvars)), d))


def _along(param: str) -> Callable[[JaxprEqn], Iterable[Axis]]:
    """All dimensions but those that a parameter names."""

    def rule(eqn: JaxprEqn) -> Iterable[Axis]:
        value, rank = eqn.params[param], len(shape_of(eqn.invars[0]))
        return _elementwise(eqn, [d % rank for d in (value if isinstance(value, tuple) else (value,))])

    return rule


def _leading(eqn: JaxprEqn) -> Iterator[Axis]:
    """The dimensions of an array of keys; those of the key itself come last."""
    inside, outside = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    for d, (size, other) in enumerate(zip(inside, outside, strict=False)):
        if size == other:
            yield Axis({0: d}, {0: d})


def _batched(rank: int) -> Callable[[JaxprEqn], Iterator[Axis]]:
    """The dimensions before the last ``rank`` of the first operand, which the operation takes whole."""

    def rule(eqn: JaxprEqn) -> Iterator[Axis]:
        for d in range(len(shape_of(eqn.invars[0])) - rank):
            yield Axis(dict.fromkeys(range(len(eqn.invars)), d), dict.fromkeys(range(len(eqn.outvars)), d))

    return rule


def _fft(eqn: JaxprEqn) -> Iterator[Axis]:
    return _batched(len(eqn.params["fft_lengths"]))(eqn)


def _convolution(eqn: JaxprEqn) -> Iterator[Axis]:
    """The examples, and the kernels; of channels in groups none."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] == 1:
        yield Axis({0: numbers.lhs_spec[0]}, {0: numbers.out_spec[0]})
        if eqn.params["feature_group_count"] == 1:
            yield Axis({1: numbers.rhs_spec[0]}, {0: numbers.out_spec[1]})


def _reduced_windows(eqn: JaxprEqn) -> Iterator[Axis]:
    """The dimensions along which each window has one element."""
    params = eqn.params
    for d, config in enumerate(
        zip(
            *(params[name] for name in ("window_dimensions", "window_strides", "base_dilation", "padding")),
            strict=True,
        )
    ):
        if config == (1, 1, 1, (0, 0)):
            yield Axis({0: d}, {0: d})


def _reduction(combine: Callable[[Any, Any], Any] | None) -> Callable[[JaxprEqn], Iterator[Axis]]:
    def rule(eqn: JaxprEqn) -> Iterator[Axis]:
        kept = 0
        for d in range(len(shape_of(eqn.invars[0]))):
            if d not in eqn.params["axes"]:
                yield Axis({0: d}, {0: kept})
                kept += 1
            elif combine is not None:
                yield Axis({0: d}, {}, combine)

    return rule


def _transpose(eqn: JaxprEqn) -> Iterator[Axis]:
    for j, d in enumerate(eqn.params["permutation"]):
        yield Axis({0: d}, {0: j})


def _broadcast(eqn: JaxprEqn) -> Iterator[Axis]:
    shape, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    source = {j: d for d, j in enumerate(eqn.params["broadcast_dimensions"])}
    for j, size in enumerate(target):
        kept = j in source and shape[source[j]] == size
        yield Axis({0: source[j]} if kept else {}, {0: j})


def _reshape(eqn: JaxprEqn) -> Iterator[Axis]:
    """Dimensions with as many elements before them: equal ones, and the first of merged or split ones."""
    if eqn.params.get("dimensions") is not None:
        return
    shape, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    begins = {math.prod(target[:j]): j for j in range(len(target)) if target[j] > 1}
    for d, size in enumerate(shape):
        j = begins.get(math.prod(shape[:d]))
        if size > 1 and j is not None:
            yield Axis({0: d}, {0: j})


def _squeeze(eqn: JaxprEqn) -> Iterator[Axis]:
    rank = len(shape_of(eqn.invars[0]))
    gone = {d % rank for d in eqn.params["dimensions"]}
    for j, d in enumerate(d for d in range(rank) if d not in gone):
        yield Axis({0: d}, {0: j})


def _dot_general(eqn: JaxprEqn) -> Iterator[Axis]:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    for j, (d, e) in enumerate(zip(left_batch, right_batch, strict=True)):
        yield Axis({0: d, 1: e}, {0: j})
    j = len(left_batch)
    for operand, used in ((0, {*left_sum, *left_batch}), (1, {*right_sum, *right_batch})):
        for d in range(len(shape_of(eqn.invars[operand]))):
            if d not in used:
                yield Axis({operand: d}, {0: j})
                j += 1
    for d, e in zip(left_sum, right_sum, strict=True):
        yield Axis({0: d, 1: e}, {}, lax.add)


def _pad(eqn: JaxprEqn) -> Iterator[Axis]:
    """The dimensions without padding, or with as much around each element as around any other one."""
    for d, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if min(low, high) >= 0 and low + high == interior:
            yield Axis({0: d}, {0: d})


def _window(eqn: JaxprEqn) -> Iterator[Axis]:
    """The dimensions of a ``slice`` or ``dynamic_slice`` taken whole, or each n-th element of which is."""
    strides = eqn.params.get("strides") or (1,) * len(shape_of(eqn.outvars[0]))
    for d, (size, taken) in enumerate(zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)):
        if size == taken * strides[d]:
            yield Axis({0: d}, {0: d})


def _update(eqn: JaxprEqn) -> Iterator[Axis]:
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), strict=True)
    for d, (size, updated) in enumerate(sizes):
        if size == updated:
            yield Axis({0: d, 1: d}, {0: d})


def _iota(eqn: JaxprEqn) -> Iterator[Axis]:
    for d in range(len(shape_of(eqn.outvars[0]))):
        if d != eqn.params["dimension"]:
            yield Axis({}, {0: d})


def _stack(eqn: JaxprEqn) -> Iterator[Axis]:
    """All dimensions but the new one."""
    new = eqn.params["axis"]
    for d in range(len(shape_of(eqn.invars[0]))):
        yield Axis(dict.fromkeys(range(len(eqn.invars)), d), {0: d + (d >= new)})


_RULES: dict[str, Callable[[JaxprEqn], Iterable[Axis]]] = {
    **dict.fromkeys(
        "sharding_constraint reshard random_fold_in igamma igammac conj complex name".split(), _elementwise
    ),
    **dict.fromkeys("random_wrap random_unwrap random_bits random_split".split(), _leading),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _along("axis")),
    **dict.fromkeys("argmax argmin".split(), _reduction(None)),
    **dict.fromkeys(
        """
        cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd symmetric_product
        triangular_solve tridiagonal
        """.split(),
        _batched(2),
    ),
    **dict.fromkeys("lu_pivots_to_permutation tridiagonal_solve".split(), _batched(1)),
    **dict.fromkeys(
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split(), scatter_axes
    ),
    **dict.fromkeys("reduce_window_max reduce_window_min reduce_window_sum".split(), _reduced_windows),
    "reduce_sum": _reduction(lax.add),
    "reduce_max": _reduction(lax.max),
    "reduce_min": _reduction(lax.min),
    "reduce_prod": _reduction(lax.mul),
    "reduce_and": _reduction(lax.bitwise_and),
    "reduce_or": _reduction(lax.bitwise_or),
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "top_k": _along("axis"),
    "approx_top_k": _along("reduction_dimension"),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "device_put": lambda eqn: _elementwise(eqn) if len(eqn.invars) == 1 else (),
    "dot_general": _dot_general,
    "dynamic_slice": _window,
    "dynamic_update_slice": _update,
    "fft": _fft,
    "gather": gather_axes,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "scan": lambda eqn: batch_axes(eqn, axes_of),
    "slice": _window,
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
}
