"""Products that are only made to be transposed become products with their operands exchanged.

JAX writes the gradient of the weights in ``x @ w`` as a product of the result's gradient and ``x``, which it
then transposes. Where ``x`` has rows and positions, XLA's code for CPUs then multiplies transposed copies,
which takes up to six times as long in float32 (docs/performance.md). The product of ``x`` and the result's
gradient is the same array.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from mpmd.compiler.jaxprs.equations import Atom, operands, shape_of
from mpmd.sharding import for_each_dimension


def without_transposed_products(eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[JaxprEqn]:
    num_readers = collections.Counter(var for eqn in eqns for var in operands(eqn))
    num_readers.update(atom for atom in results if not isinstance(atom, Literal))
    products = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive.name == "dot_general"}
    exchanged: dict[Var, JaxprEqn] = {}
    dropped: set[Var] = set()
    for eqn in eqns:
        for var in operands(eqn) if eqn.primitive.name == "transpose" else ():
            product = products.get(var)
            if product is not None and num_readers[var] == 1 and _exchanges(eqn, product):
                exchanged[var] = _exchanged(product, eqn)
                dropped.update(eqn.outvars)
    return [
        exchanged.get(eqn.outvars[0], eqn) if eqn.outvars else eqn
        for eqn in eqns
        if dropped.isdisjoint(eqn.outvars)
    ]


def _exchanges(transposition: JaxprEqn, product: JaxprEqn) -> bool:
    """Whether a transposition puts the second operand's dimensions before the first operand's."""
    (contracted, _), (batched, _) = product.params["dimension_numbers"]
    of_product = range(len(shape_of(product.outvars[0])))
    end_of_first = len(shape_of(product.invars[0])) - len(contracted)
    first, second = of_product[len(batched) : end_of_first], of_product[end_of_first:]
    return transposition.params["permutation"] == (*of_product[: len(batched)], *second, *first)


def _exchanged(product: JaxprEqn, transposition: JaxprEqn) -> JaxprEqn:
    contracted, batched = product.params["dimension_numbers"]
    params = {
        **product.params,
        "dimension_numbers": (contracted[::-1], batched[::-1]),
        "precision": _exchanged_precision(product.params["precision"]),
        "out_sharding": _transposed(product.params["out_sharding"], transposition.params["permutation"]),
    }
    return product.replace(invars=product.invars[::-1], outvars=transposition.outvars, params=params)


def _exchanged_precision(precision: Any) -> Any:
    """The precision of a product with its operands exchanged; an algorithm is a tuple, too."""
    if isinstance(precision, lax.DotAlgorithm):
        return precision._replace(
            lhs_precision_type=precision.rhs_precision_type,
            rhs_precision_type=precision.lhs_precision_type,
            lhs_component_count=precision.rhs_component_count,
            rhs_component_count=precision.lhs_component_count,
        )
    return precision[::-1] if isinstance(precision, tuple) else precision


def _transposed(sharding: NamedSharding | None, permutation: Sequence[int]) -> NamedSharding | None:
    if sharding is None:
        return None
    spec = sharding.spec
    axes = for_each_dimension(spec, len(permutation))
    transposed = PartitionSpec(
        *(axes[dim] for dim in permutation), unreduced=spec.unreduced, reduced=spec.reduced
    )
    return NamedSharding(sharding.mesh, transposed)
