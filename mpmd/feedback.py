"""Guesses which results of a step are arguments of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var

from mpmd.jaxpr import aval_of, operands


def find_feedback(arguments: Sequence[Any], result: Any, jaxpr: Jaxpr) -> tuple[tuple[int, int], ...]:
    """Pairs (argument leaf, result leaf) that a training loop will connect.

    A part of the result goes with the first argument that has the same structure, shapes and dtypes and is
    not taken; of single arrays only with one that it depends on, scalars of the same weak type too, which
    tells a step counter from a loss. A wrong guess costs a transfer when the step is called, never a wrong
    number.

    Args:
      arguments: the step's arguments.
      result: what it returns, as ``ShapeDtypeStruct``s.
      jaxpr: the step over flat arguments and results.
    """
    starts = [0]
    for argument in arguments:
        starts.append(starts[-1] + len(jax.tree.leaves(argument)))
    free = dict(enumerate(arguments))
    pairs: list[tuple[int, int]] = []

    def match(part: Any, first_leaf: int) -> None:
        signature = _signature(part)
        for i, argument in free.items():
            if signature[1] and _signature(argument) == signature:
                leaves = range(len(signature[1]))
                if len(leaves) > 1 or _connected(jaxpr, starts[i], first_leaf):
                    pairs.extend((starts[i] + k, first_leaf + k) for k in leaves)
                    del free[i]
                    return
        children = _children(part)
        for child in children:
            match(child, first_leaf)
            first_leaf += len(jax.tree.leaves(child))

    match(result, 0)
    return tuple(pairs)


def _signature(tree: Any) -> tuple[Any, tuple]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves)


def _children(tree: Any) -> list[Any]:
    """The direct parts of a pytree node; none of a leaf."""
    children = jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)[0]
    return [child for child in children if child is not tree]


def _connected(jaxpr: Jaxpr, argument: int, result: int) -> bool:
    before, after = aval_of(jaxpr.invars[argument]), aval_of(jaxpr.outvars[result])
    if before.shape == () and before.weak_type != after.weak_type:
        return False
    reached = {jaxpr.invars[argument]}
    for eqn in jaxpr.eqns:
        if any(var in reached for var in operands(eqn)):
            reached.update(eqn.outvars)
    outvar = jaxpr.outvars[result]
    return isinstance(outvar, Var) and outvar in reached
