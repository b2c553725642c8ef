"""The table of rules: which dimensions the operands and results of each primitive have in common.

A new primitive without a body is one entry of ``RULES``; one that is elementwise is a name in
``ELEMENTWISE``, which ``cost.py`` reads, too. These read the table: the cut of layers, scans in parts,
partial sums, the planner's classes and microbatches, and the shardings that ``sharded_dimensions.py``
guesses. Without an entry they compute from whole values: more slowly, with the same results. A test names
the primitives without an entry, each with the reason (``tests/support/primitives.py``).

Other tables say other things of a primitive, and their defaults are safe, too: whether it is cheap
(``cost.py``), whether it is a product or a view (``work.py``), in which operands it is linear
(``shard/linear.py``), which operands it takes apart or puts together (``cut_layers/concat_and_slice.py``),
and whether it is a sum that can stay partial (``shard/sums.py``). ``capture/walk.py`` reads ``ELEMENTWISE``,
too, in its search for NaNs. A primitive that calls a jaxpr, or has a body, is first a name in
``canonical.py``; one with a mesh in its parameters, in ``trace/over_submeshes.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.attention import CUDNN_ATTENTION, attention_dimensions
from mpmd.compiler.jaxprs.batched_scans import PartParams, batch_dimensions, batched_body
from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.equations import shape_of
from mpmd.compiler.jaxprs.indexed_dimensions import gather_dimensions, gather_params, scatter_dimensions
from mpmd.compiler.jaxprs.products import product_dimensions, ragged_product_dimensions

FindDimensions = Callable[[JaxprEqn], Iterable[CommonDimension]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The dimensions of a primitive's operands and results.

    Attributes:
      dimensions: lists the dimensions that an equation's operands and results have in common, of any size.
      part_params: the parameters that differ in a part of an equation, given an exact dimension and how many
        of its elements the part has.
      moves: whether a dimension may have another number in a result than in its operand. Otherwise a
        dimension that the rule does not list, such as a sorted one, probably keeps its number.
    """

    dimensions: FindDimensions
    part_params: PartParams = lambda eqn, dimension, size: {}
    moves: bool = False


def common_dimensions(eqn: JaxprEqn) -> Iterable[CommonDimension]:
    rule = RULES.get(eqn.primitive.name)
    return rule.dimensions(eqn) if rule else ()


def exact_dimensions(eqn: JaxprEqn) -> list[CommonDimension]:
    """The dimensions of more than one element along which an equation can be written as several."""
    return [one for one in common_dimensions(eqn) if one.promise == "exact" and one.size(eqn) > 1]


def shared_dimensions(eqn: JaxprEqn) -> list[CommonDimension]:
    """The dimensions of more than one element along which devices can share an equation."""
    return [one for one in common_dimensions(eqn) if one.promise != "guess" and one.size(eqn) > 1]


def likely_dimensions(eqn: JaxprEqn) -> list[CommonDimension]:
    """Returns the common dimensions, and guesses for dimensions or primitives without a rule."""
    rule = RULES.get(eqn.primitive.name)
    likely = list(rule.dimensions(eqn)) if rule else []
    if rule is None or not rule.moves:
        known = {pair for one in likely for pair in one.outs.items()}
        if len(known) < sum(len(shape_of(var)) for var in eqn.outvars):
            likely += (one for one in _in_place(eqn) if known.isdisjoint(one.outs.items()))
    return likely


def _in_place(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """Guesses that a result and its operands of the same rank share dimensions of equal number and size.

    If there are as many results as operands, of the same shapes, each result belongs to one operand.
    """
    old, new = ([shape_of(atom) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    for i, target in enumerate(new):
        sources = [i] if old == new else [k for k, shape in enumerate(old) if len(shape) == len(target)]
        for d, size in enumerate(target):
            if ins := {k: d for k in sources if old[k][d] == size}:
                yield CommonDimension(ins, {i: d}, "guess")


def part_params(eqn: JaxprEqn, dimension: CommonDimension, size: int) -> Mapping[str, Any]:
    rule = RULES.get(eqn.primitive.name)
    return rule.part_params(eqn, dimension, size) if rule else {}


# Parameters of parts.


def _shape_param(name: str) -> PartParams:
    def params(eqn: JaxprEqn, dimension: CommonDimension, size: int) -> Mapping[str, Any]:
        shape = list(eqn.params[name])
        shape[dimension.outs[0]] = size
        return {name: tuple(shape)}

    return params


def _slice_params(eqn: JaxprEqn, dimension: CommonDimension, size: int) -> Mapping[str, Any]:
    d = dimension.outs[0]
    stride = (eqn.params["strides"] or [1] * (d + 1))[d]
    limits = list(eqn.params["limit_indices"])
    limits[d] = eqn.params["start_indices"][d] + (size - 1) * stride + 1
    return {"limit_indices": tuple(limits)}


def _scan_params(eqn: JaxprEqn, dimension: CommonDimension, size: int) -> Mapping[str, Any]:
    return {"jaxpr": batched_body(eqn, dimension, size, exact_dimensions, part_params)}


# Dimensions.


def _passed(operand: int, result: int) -> CommonDimension:
    """A dimension of the first operand that is a dimension of the first result."""
    return CommonDimension({0: operand}, {0: result})


def _elementwise(eqn: JaxprEqn, but: Collection[int] = ()) -> Iterator[CommonDimension]:
    """All dimensions of the result. An operand without one has one element there, or is a scalar."""
    target = shape_of(eqn.outvars[0])
    shapes = [shape_of(atom) for atom in eqn.invars]
    results = range(len(eqn.outvars))
    for d, size in enumerate(target):
        if d not in but:
            along = (i for i, shape in enumerate(shapes) if len(shape) == len(target) and shape[d] == size)
            yield CommonDimension(dict.fromkeys(along, d), dict.fromkeys(results, d))


def _but(param: str) -> FindDimensions:
    """Lists the dimensions that the parameter ``param`` does not name."""

    def rule(eqn: JaxprEqn) -> Iterable[CommonDimension]:
        value, rank = eqn.params[param], len(shape_of(eqn.invars[0]))
        return _elementwise(eqn, [d % rank for d in (value if isinstance(value, tuple) else (value,))])

    return rule


def _leading(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """The dimensions of an array of keys; the dimensions of a single key come last and are left out."""
    inside, outside = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    for d, (size, other) in enumerate(zip(inside, outside, strict=False)):
        if size == other:
            yield _passed(d, d)


def _batched(rank: int) -> FindDimensions:
    """The dimensions before the last ``rank`` of the first operand, which the operation takes whole."""

    def rule(eqn: JaxprEqn) -> Iterator[CommonDimension]:
        for d in range(len(shape_of(eqn.invars[0])) - rank):
            yield CommonDimension(
                dict.fromkeys(range(len(eqn.invars)), d), dict.fromkeys(range(len(eqn.outvars)), d)
            )

    return rule


def _fft(eqn: JaxprEqn) -> Iterable[CommonDimension]:
    return _batched(len(eqn.params["fft_lengths"]))(eqn)


def _convolution(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """The dimension of examples; also output and input channels, unless channels are in groups."""
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] == 1:
        yield CommonDimension({0: numbers.lhs_spec[0]}, {0: numbers.out_spec[0]})
        if groups == 1:
            yield CommonDimension({1: numbers.rhs_spec[0]}, {0: numbers.out_spec[1]})
            yield CommonDimension({0: numbers.lhs_spec[1], 1: numbers.rhs_spec[1]}, {}, "shared")


def _reduced_windows(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    names = ("window_dimensions", "window_strides", "base_dilation", "padding")
    for d, config in enumerate(zip(*(eqn.params[name] for name in names), strict=True)):
        if config == (1, 1, 1, (0, 0)):
            yield _passed(d, d)


def _reduction(combine: Callable[[Any, Any], Any] | None) -> FindDimensions:
    """Lists all dimensions; reduced ones only if ``combine`` makes one result of two parts' results."""

    def rule(eqn: JaxprEqn) -> Iterator[CommonDimension]:
        kept = itertools.count()
        for d in range(len(shape_of(eqn.invars[0]))):
            if d not in eqn.params["axes"]:
                yield _passed(d, next(kept))
            elif combine is not None:
                yield CommonDimension({0: d}, {}, combine=combine)

    return rule


def _transpose(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    for j, d in enumerate(eqn.params["permutation"]):
        yield _passed(d, j)


def _broadcast(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    shape, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    source = {j: d for d, j in enumerate(eqn.params["broadcast_dimensions"])}
    for j, size in enumerate(target):
        is_kept = j in source and shape[source[j]] == size
        yield CommonDimension({0: source[j]} if is_kept else {}, {0: j})


def reshaped(eqn: JaxprEqn) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields pairs of dimensions of a reshape's operand and of its result that hold the same elements.

    Each pair is as small as possible: a dimension that stays is paired with itself, and several dimensions
    are merged or split. Dimensions of one element at the end may be missing.
    """
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if 0 in old:
        return
    i = j = 0
    while i < len(old) and j < len(new):
        first, target, before, after = i, j, old[i], new[j]
        while before != after:
            if before < after:
                i += 1
                before *= old[i]
            else:
                j += 1
                after *= new[j]
        i, j = i + 1, j + 1
        yield range(first, i), range(target, j)


def _reshape(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """The first dimension of each merge or split: as many elements come before it in operand and result."""
    if eqn.params.get("dimensions") is not None:
        return
    shape, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    for old, new in reshaped(eqn):
        d = next((d for d in old if shape[d] > 1), old[-1])
        j = next((j for j in new if target[j] > 1), new[-1])
        yield _passed(d, j)


def _squeeze(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    rank = len(shape_of(eqn.invars[0]))
    gone = {d % rank for d in eqn.params["dimensions"]}
    for j, d in enumerate(d for d in range(rank) if d not in gone):
        yield _passed(d, j)


def _pad(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """The dimensions without padding, or with as much around each element as around any other one."""
    for d, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if min(low, high) >= 0 and low + high == interior:
            yield _passed(d, d)


def _window(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """The dimensions of a ``slice`` or ``dynamic_slice`` taken whole, or each n-th element of which is."""
    strides = eqn.params.get("strides") or (1,) * len(shape_of(eqn.outvars[0]))
    for d, (size, taken) in enumerate(zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)):
        if size == taken * strides[d]:
            yield _passed(d, d)


def _update(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), strict=True)
    for d, (size, updated) in enumerate(sizes):
        if size == updated:
            yield CommonDimension({0: d, 1: d}, {0: d})


def _iota(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """All dimensions. Devices can count along one that is divided, each from a number of its own."""
    for d in range(len(shape_of(eqn.outvars[0]))):
        yield CommonDimension({}, {0: d}, "shared" if d == eqn.params["dimension"] else "exact")


def _stack(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    new = eqn.params["axis"]
    for d in range(len(shape_of(eqn.invars[0]))):
        yield CommonDimension(dict.fromkeys(range(len(eqn.invars)), d), {0: d + (d >= new)})


def _each(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """Pairs each result with the operand at the same position; devices can share its dimensions."""
    for i, atom in enumerate(eqn.invars):
        for d in range(len(shape_of(atom))):
            yield CommonDimension({i: d}, {i: d}, "shared")


def _put(eqn: JaxprEqn) -> Iterable[CommonDimension]:
    return _elementwise(eqn) if len(eqn.invars) == 1 else ()


def _scan(eqn: JaxprEqn) -> Iterable[CommonDimension]:
    return batch_dimensions(eqn, exact_dimensions)


ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul ne neg nextafter
    not one_minus_square or polynomial population_count pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor
    """.split()
)
"""Elementwise primitives: an element of a result depends on the same element of each operand, or on a scalar.
"""

_OF_ELEMENTS = Rule(_elementwise)


def _entries(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _OF_ELEMENTS),
    "layers": _OF_ELEMENTS,
    **_entries("sharding_constraint reshard random_fold_in igamma igammac conj complex name", _OF_ELEMENTS),
    "device_put": Rule(_put),
    **_entries("optimization_barrier kernel_boundary", Rule(_each)),
    **_entries(CUDNN_ATTENTION, Rule(attention_dimensions)),
    # Moved.
    "broadcast_in_dim": Rule(_broadcast, _shape_param("shape")),
    "reshape": Rule(_reshape, _shape_param("new_sizes"), moves=True),
    "squeeze": Rule(_squeeze),
    "transpose": Rule(_transpose, moves=True),
    "rev": Rule(_but("dimensions")),
    "iota": Rule(_iota, _shape_param("shape")),
    # Put together and taken apart.
    "concatenate": Rule(_but("dimension")),
    "split": Rule(_but("axis")),
    "stack": Rule(_stack),
    "pad": Rule(_pad),
    "slice": Rule(_window, _slice_params),
    "dynamic_slice": Rule(_window, _shape_param("slice_sizes")),
    "dynamic_update_slice": Rule(_update),
    "gather": Rule(gather_dimensions, gather_params, moves=True),
    **_entries(
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub",
        Rule(scatter_dimensions, moves=True),
    ),
    # Reduced and put in order.
    "dot_general": Rule(product_dimensions, moves=True),
    "ragged_dot_general": Rule(ragged_product_dimensions, moves=True),
    "conv_general_dilated": Rule(_convolution, moves=True),
    "reduce_sum": Rule(_reduction(lax.add)),
    "reduce_max": Rule(_reduction(lax.max)),
    "reduce_min": Rule(_reduction(lax.min)),
    "reduce_prod": Rule(_reduction(lax.mul)),
    "reduce_and": Rule(_reduction(lax.bitwise_and)),
    "reduce_or": Rule(_reduction(lax.bitwise_or)),
    "reduce_xor": Rule(_reduction(lax.bitwise_xor)),
    **_entries("argmax argmin", Rule(_reduction(None))),
    **_entries("reduce_window_max reduce_window_min reduce_window_sum", Rule(_reduced_windows)),
    **_entries("cumsum cumprod cummax cummin cumlogsumexp", Rule(_but("axis"))),
    "sort": Rule(_but("dimension")),
    "top_k": Rule(_but("axis")),
    "approx_top_k": Rule(_but("reduction_dimension")),
    # Of matrices and of keys.
    **_entries(
        """
        cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd symmetric_product
        triangular_solve tridiagonal
        """,
        Rule(_batched(2)),
    ),
    **_entries("lu_pivots_to_permutation tridiagonal_solve", Rule(_batched(1))),
    "fft": Rule(_fft),
    **_entries("random_wrap random_unwrap random_bits random_split", Rule(_leading)),
    # Of loops.
    "scan": Rule(_scan, _scan_params),
}
