"""The work of equations: operations, and bytes that they read and write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.attention import attention_operations
from mpmd.compiler.jaxprs.cost import is_elementwise
from mpmd.compiler.jaxprs.equations import Atom, all_eqns, aval_of, operands, size, subjaxprs

_VIEWS = frozenset("broadcast_in_dim expand_dims iota reshape rev slice squeeze transpose".split())


PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
"""Matrix products and convolutions. A ragged product is one product of each group of rows."""

OPERATIONS_PER_BYTE = 10.0
"""The operations that equal reading or writing a byte of memory, in the work of a layer.

Devices do between ten (processors) and three hundred (accelerators' matrix units) operations meanwhile. The
small number has layers follow products, whatever the device; a plan counts both by the cluster's own numbers.
"""


def has_product(eqn: JaxprEqn) -> bool:
    return any(
        one.primitive.name in PRODUCTS or attention_operations(one) is not None for one in all_eqns([eqn])
    )


def product_kind(eqn: JaxprEqn, parts: Sequence[int] = (), in_kernel: bool = False) -> str | None:
    """The kind and dtype of a product, as ``"batched_product bfloat16"``; ``None`` for another equation.

    Args:
      parts: the number of devices that divide each dimension of the result; by default none does. A device
        with one product of a batch has a plain one.
      in_kernel: whether it is inside a kernel. Of attention, equations multiply gradients of scores in
        float32 by keys in bfloat16, and kernels multiply in bfloat16.
    """
    is_attention = attention_operations(eqn) is not None
    if eqn.primitive.name not in PRODUCTS and not is_attention:
        return None
    kind = "batched_product" if is_attention else "convolution"
    if eqn.primitive.name == "dot_general":
        _, (batched, _) = eqn.params["dimension_numbers"]
        batch = aval_of(eqn.outvars[0]).shape[: len(batched)]
        is_batched = any(size > part for size, part in zip(batch, parts or [1] * len(batch), strict=False))
        kind = "batched_product" if is_batched else "product"
    elif eqn.primitive.name == "ragged_dot_general":
        kind = "product"
    # Operands in FP8 may have two dtypes, which are not promoted.
    dtypes, choose = [aval_of(atom).dtype for atom in eqn.invars[:2]], min if in_kernel else max
    return f"{kind} {choose(dtypes, key=lambda dtype: dtype.itemsize)}"


def operations(eqn: JaxprEqn) -> int:
    """Multiplications and additions of a matrix product, a convolution or cuDNN's attention.

    Any other equation counts as one operation for each element of its results.
    """
    if (of_attention := attention_operations(eqn)) is not None:
        return of_attention
    num_elements = sum(map(size, eqn.outvars))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = num_elements * math.prod(aval_of(eqn.invars[0]).shape[axis] for axis in contracted)
        return _of_multiply_add(eqn) * terms
    if eqn.primitive.name == "ragged_dot_general":
        return _ragged_operations(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = aval_of(eqn.invars[1]).shape
        terms = num_elements * math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        dilation = math.prod(eqn.params["lhs_dilation"])  # inserts zeros, which devices skip
        return _of_multiply_add(eqn) * terms // dilation
    return num_elements


def _of_multiply_add(eqn: JaxprEqn) -> int:
    return 8 if aval_of(eqn.outvars[0]).dtype.kind == "c" else 2


def _ragged_operations(eqn: JaxprEqn) -> int:
    """The operations of products of groups of rows, whose sizes add up to all rows."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    rows = aval_of(eqn.invars[0]).shape
    of_one_group = 2 * size(eqn.outvars[0]) * math.prod(rows[axis] for axis in contracted)
    # A group's part of the result, such as the gradient of an expert's weights, sums over its rows alone.
    is_summed = any(axis in contracted for axis in numbers.lhs_ragged_dimensions)
    return of_one_group // aval_of(eqn.invars[2]).shape[-1] if is_summed else of_one_group


def total_operations(eqns: Iterable[JaxprEqn]) -> int:
    return sum(
        eqn.params.get("length", 1) * sum(total_operations(jaxpr.eqns) for jaxpr in inner)
        if (inner := subjaxprs(eqn))
        else operations(eqn)
        for eqn in eqns
    )


def nbytes(atom: Atom) -> int:
    """Bytes of a value; a random key counts as the numbers inside."""
    return size(atom) * aval_of(atom).dtype.itemsize


def traffic(eqn: JaxprEqn) -> int:
    """Bytes of memory that an equation reads and writes, if XLA fuses all that it can.

    Elementwise equations and changes of layout cost nothing: XLA fuses them into the equations that read
    their results.
    """
    if is_elementwise(eqn) or eqn.primitive.name in _VIEWS:
        return 0
    if eqn.primitive.name in ("gather", "dynamic_slice"):  # reads no more of its source than it gives
        return 2 * sum(map(nbytes, eqn.outvars))
    return sum(map(nbytes, {*operands(eqn), *eqn.outvars}))


class WorkOf:
    """Work in operations, where a byte of traffic counts as ``OPERATIONS_PER_BYTE``; remembers jaxprs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Jaxpr, float]] = {}

    def equation(self, eqn: JaxprEqn) -> float:
        """Counts nested jaxprs: every iteration of a scan, one iteration of a ``while`` loop."""
        inner = subjaxprs(eqn)
        if not inner:
            return operations(eqn) + OPERATIONS_PER_BYTE * traffic(eqn)
        if eqn.primitive.name == "cond":
            return max(map(self.jaxpr, inner))
        # What differentiates a function, as in a custom_vjp_call, is a function, no jaxpr.
        return eqn.params.get("length", 1) * sum(map(self.jaxpr, inner))

    def jaxpr(self, jaxpr: Jaxpr) -> float:
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, sum(map(self.equation, jaxpr.eqns))
        return self._known[id(jaxpr)][1]
