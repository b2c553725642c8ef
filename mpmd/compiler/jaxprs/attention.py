"""Attention of cuDNN, as equations of ``jax.nn.dot_product_attention(..., implementation="cudnn")``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.equations import shape_of

CUDNN_ATTENTION = """
    dot_product_attention_fwd dot_product_attention_fwd_wrapper
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
"""

_CAUSAL_MASKS = (2, 3)
_BNTH = 1


def attention_operations(eqn: JaxprEqn) -> int | None:
    """The operations of cuDNN's attention, without masked scores; ``None`` for other equations.

    Its forward has two products, and its backward five: it computes the scores again.
    """
    name = eqn.primitive.name
    if name not in CUDNN_ATTENTION.split():
        return None
    query, key, value = (shape_of(atom) for atom in eqn.invars[:3])
    heads, length, keys = (1, 2, 2) if eqn.params["layout"] == _BNTH else (2, 1, 1)
    scores = math.prod(query[:-3]) * query[-3:][heads - 1] * query[-3:][length - 1] * key[-3:][keys - 1]
    of_score = 2 * query[-1] + 2 * value[-1]
    if "bwd" in name:
        of_score = 6 * query[-1] + 4 * value[-1]
    return scores * of_score // (2 if eqn.params["mask_type"] in _CAUSAL_MASKS else 1)


def attention_dimensions(eqn: JaxprEqn) -> Iterator[CommonDimension]:
    """The rows and the heads of cuDNN's attention, for queries, keys and values with as many heads.

    Of other operands, such as a bias, nothing is said: they are whole.
    """
    rank, heads = len(shape_of(eqn.invars[0])), -3 if eqn.params["layout"] else -2
    shapes = [shape_of(atom) for atom in eqn.invars]
    results = [shape_of(var) for var in eqn.outvars]
    for d in (*range(rank - 3), rank + heads):
        size = shapes[0][d]
        same = [i for i, shape in enumerate(shapes) if len(shape) == rank and shape[d] == size]
        outs = {i: d for i, shape in enumerate(results) if len(shape) == rank and shape[d] == size}
        statistics = {i: min(d, rank - 3) for i, shape in enumerate(results) if len(shape) == rank - 1}
        if {0, 1, 2} <= {*same}:
            yield CommonDimension(dict.fromkeys(same, d), {**outs, **statistics}, "shared")
