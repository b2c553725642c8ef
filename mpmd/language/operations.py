"""The interface of the operations by which ``treduce`` combines the results of microbatches."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from mpmd.validation import shown


class Op(Protocol):
    """The accumulation of one leaf of the loop's result.

    Its meaning, for ``n`` microbatches with results ``values``::

        state = op.state(n, shape_and_dtype_of_a_value)
        for index in range(n):
            state = op.update(state, values[index], index)
    """

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        """The state before the first of ``n`` microbatches; ``a`` has the shape and dtype of one's value.

        Along explicit mesh axes the state gets the sharding that ``update`` gives it.
        """
        ...

    def update(self, state: jax.Array, update: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the state after microbatch ``index``, an int32 scalar; ``state``'s shape and dtype stay."""
        ...


def is_op(x: Any) -> bool:
    return hasattr(x, "state") and hasattr(x, "update") and not isinstance(x, type)


def operation_faults(name: str, operation: Any) -> list[TypeError]:
    """The faults of an ``Op``, or of a pytree of ``Op``s; ``None`` may stand for ``None`` in a result."""
    what = (
        "an operation, such as mpmd.Mean, mpmd.Add or mpmd.Concat(axis=0), or an object with the methods "
        "state and update"
    )
    return [
        TypeError(f"{name} must be {what}, not {shown(leaf)}")
        for leaf in jax.tree.leaves(operation, is_leaf=is_op)
        if not is_op(leaf)
    ]
