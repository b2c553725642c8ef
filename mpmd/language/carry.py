"""The function of a microbatch, with the carry that it hands to the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from mpmd.sharding import described, explicit_sharding
from mpmd.util.tree import named_leaves, with_leaves


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A traced function of the leaves of a carry, if there is one, and of the microbatch index.

    Attributes:
      traced: returns the leaves of the next carry, then the leaves of the microbatch's result.
      initial: the leaves that the first microbatch takes.
      treedef: of the carry.
      result: the shape of the microbatch's result, a pytree.
    """

    traced: ClosedJaxpr
    initial: tuple[jax.Array, ...]
    treedef: Any
    result: Any

    @classmethod
    def of(cls, fun: Callable[..., Any], carry: Any) -> Microbatch:
        """Traces ``fun`` of the carry and the index; of the index alone, if ``carry`` is ``None``.

        Raises: ``TypeError`` when it returns another carry than it takes.
        """
        leaves, treedef = jax.tree.flatten(carry)
        initial = tuple(map(jnp.asarray, leaves))

        def of_leaves(leaves, i):
            return ((), fun(i)) if carry is None else fun(jax.tree.unflatten(treedef, leaves), i)

        avals = [described(jax.typeof(leaf)) for leaf in initial]
        index = jax.ShapeDtypeStruct((), jnp.int32)
        traced, result = jax.make_jaxpr(of_leaves, return_shape=True)(avals, index)
        _check_carry(carry, result)
        return cls(traced, initial, treedef, result[1])

    @property
    def outs(self) -> list[jax.ShapeDtypeStruct]:
        return [described(aval) for aval in self.traced.out_avals[len(self.initial) :]]

    @property
    def states(self) -> list[jax.Array]:
        """The initial leaves of the carry that microbatches change; unchanged leaves are loop constants."""
        return [self.initial[i] for i in self._changing]

    @property
    def _changing(self) -> list[int]:
        before, after = self.traced.jaxpr.invars, self.traced.jaxpr.outvars
        return [i for i in range(len(self.initial)) if before[i] is not after[i]]

    def __call__(self, index: jax.Array, states: Sequence[jax.Array]) -> tuple[list[Any], list[Any]]:
        """The next values of ``states``, and the leaves of the microbatch's result."""
        leaves = self._with(states)
        values = jaxpr_as_fun(self.traced)(*leaves, index)
        next_states = [_sharded_like(leaves[i], values[i]) for i in self._changing]
        # A leaf of the carry that is also a result becomes a second value.
        inputs = set(self.traced.jaxpr.invars)
        outvars = self.traced.jaxpr.outvars[len(leaves) :]
        return next_states, [
            jnp.copy(value) if isinstance(atom, Var) and atom in inputs else value
            for value, atom in zip(values[len(leaves) :], outvars, strict=True)
        ]

    def carry_with(self, states: Sequence[jax.Array]) -> Any:
        return jax.tree.unflatten(self.treedef, self._with(states))

    def _with(self, states: Sequence[jax.Array]) -> list[jax.Array]:
        return with_leaves(self.initial, self._changing, states[: len(self._changing)])


def _check_carry(carry: Any, result: Any) -> None:
    if carry is None:
        return
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "with a carry, the function of treduce returns a pair, the next carry and the result of the "
            f"microbatch, as that of lax.scan does, not {jax.tree.structure(result)}"
        )
    before: Any = jax.tree.structure(carry)
    after: Any = jax.tree.structure(result[0])
    if before != after:
        raise TypeError(
            f"the function of treduce takes a carry of the structure {before}, but returns {after}"
        )
    leaves = zip(named_leaves("carry", carry), jax.tree.leaves(result[0]), strict=True)
    changed = [
        f"{path} is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}, but the "
        f"function of treduce returns {new.dtype}{list(new.shape)} for it"
        for (path, leaf), new in leaves
        if (jnp.shape(leaf), jax.dtypes.result_type(leaf)) != (new.shape, new.dtype)
    ]
    if changed:
        raise TypeError("\n".join(changed))


def _sharded_like(state: jax.Array, value: jax.Array) -> jax.Array:
    before, after = (explicit_sharding(jax.typeof(array)) for array in (state, value))
    return value if before is None or before == after else jax.sharding.reshard(value, before)
