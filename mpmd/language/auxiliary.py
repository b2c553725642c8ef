"""Combines the auxiliary outputs of a loss for microbatches into the auxiliary output for the batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpmd.language.operations import Op, is_op
from mpmd.language.reduce import Concat
from mpmd.sharding import explicit_sharding, for_each_dimension, to_sharding
from mpmd.util.tables import first_few
from mpmd.util.tree import broadcast_prefix, named_leaves


def weighted(tree: Any, weight: jax.Array | None) -> Any:
    """The leaves times the weight, if there is one. A zero weight gives zeros, also of NaNs."""
    if weight is None:
        return tree

    def times(leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        wide = leaf.dtype if leaf.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
        product = lax.mul(leaf.astype(wide), jnp.broadcast_to(weight.astype(wide), leaf.shape))
        return jnp.where(weight == 0, jnp.zeros_like(leaf), product.astype(leaf.dtype))

    return jax.tree.map(times, tree)


@dataclasses.dataclass(frozen=True)
class _AuxRule:
    """The rule by which a leaf of the auxiliary output is combined.

    Attributes:
      is_reduced: whether it is weighted as the value is.
      finish: makes the result of the accumulated value.
    """

    op: Op
    is_reduced: bool = False
    finish: Callable[[jax.Array], jax.Array] = lambda accumulated: accumulated


@dataclasses.dataclass(eq=False)
class AuxRules:
    """The rules for the leaves of the auxiliary output, found while the loss of a microbatch is traced.

    Attributes:
      size: the number of microbatches.
      of_batch: computes the auxiliary output of the whole batch. It is traced if rules depend on its shapes:
        if a leaf has no operation in ``aux_reduction``, and axes, or is of a single row.
      has_single_rows: whether the microbatches of an argument have one row, whose axis may be squeezed.
      aux_reduction: as of ``value_and_grad``.
      reduced: the operation of the value.
      operations: the operation of each leaf. ``treduce`` reads them after it has traced the loss.
    """

    size: int
    of_batch: Callable[[], Any]
    has_single_rows: bool
    aux_reduction: Any
    reduced: Op
    operations: list[Op] = dataclasses.field(default_factory=list)
    _rules: list[_AuxRule] = dataclasses.field(default_factory=list)
    _treedef: Any = None

    def find(self, aux: Any) -> None:
        named, self._treedef = named_leaves("aux", aux), jax.tree.structure(aux)
        leaves = [jax.typeof(leaf) for _, leaf in named]
        try:
            ops = broadcast_prefix(self.aux_reduction, aux, lambda x: x is None or is_op(x))
        except ValueError as error:
            raise TypeError(
                f"aux_reduction {self.aux_reduction} is not a pytree prefix of the auxiliary output, which "
                f"has the structure {self._treedef}"
            ) from error
        whole = leaves
        pairs = zip(ops, leaves, strict=True)
        may_grow = any(op is None and (leaf.shape or self.has_single_rows) for op, leaf in pairs)
        if self.size > 1 and may_grow:
            whole = jax.tree.leaves(jax.eval_shape(self.of_batch))
        rules: list[_AuxRule] = []
        faults: list[str] = []
        for (path, _), leaf, of_whole, op in zip(named, leaves, whole, ops, strict=True):
            rule = _AuxRule(op) if op is not None else _default_rule(leaf, of_whole, self.size, self.reduced)
            if rule is not None:
                rules.append(rule)
            else:
                faults.append(
                    f"{path} is {leaf.dtype}{list(leaf.shape)} of a microbatch and "
                    f"{of_whole.dtype}{list(of_whole.shape)} of the batch"
                )
        if faults:
            raise TypeError(
                "auxiliary output that is neither rows nor floats, which are reduced as the loss is: say in "
                "aux_reduction how to combine it, e.g. with mpmd.Add, mpmd.Max or mpmd.Concat(); "
                + first_few(faults, 5)
            )
        self._rules = rules
        self.operations[:] = [rule.op for rule in rules]

    def weighted(self, aux: Any, weight: jax.Array | None) -> list[Any]:
        pairs = zip(self._rules, jax.tree.leaves(aux), strict=True)
        return [weighted(leaf, weight) if rule.is_reduced else leaf for rule, leaf in pairs]

    def finished(self, accumulated: Sequence[jax.Array]) -> Any:
        leaves = [rule.finish(leaf) for rule, leaf in zip(self._rules, accumulated, strict=True)]
        return jax.tree.unflatten(self._treedef, leaves)


def with_aux(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Has ``fun`` return a pair of value and auxiliary output; without ``has_aux``, this output is empty."""

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        if not has_aux:
            return result, ()
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "with has_aux, the function returns a pair, the value and the auxiliary output, not "
                f"{jax.tree.structure(result)}"
            )
        return result

    return checked


def _default_rule(leaf: Any, whole: Any, size: int, reduced: Op) -> _AuxRule | None:
    """The rule that makes the leaf of the whole batch; ``None`` if none evidently does."""
    if size == 1:
        return _AuxRule(Concat(), finish=lambda stacked: stacked[0])
    if leaf.shape == whole.shape:
        return _AuxRule(reduced, is_reduced=True) if jnp.issubdtype(leaf.dtype, jnp.inexact) else None
    if len(leaf.shape) != len(whole.shape):
        return None
    growing = [
        axis for axis, sizes in enumerate(zip(leaf.shape, whole.shape, strict=True)) if len({*sizes}) > 1
    ]
    if len(growing) != 1 or whole.shape[growing[0]] != size * leaf.shape[growing[0]]:
        return None
    return _AuxRule(Concat(growing[0]), finish=functools.partial(_merged, axis=growing[0]))


def _merged(stacked: jax.Array, axis: int) -> jax.Array:
    """``(..., microbatches, rows, ...)`` as ``(..., microbatches * rows, ...)``, both at ``axis``."""
    shape = (*stacked.shape[:axis], math.prod(stacked.shape[axis : axis + 2]), *stacked.shape[axis + 2 :])
    sharding = explicit_sharding(jax.typeof(stacked))
    if sharding is None:
        return lax.reshape(stacked, shape)
    entries = for_each_dimension(sharding.spec, stacked.ndim)
    del entries[axis]
    return lax.reshape(stacked, shape, out_sharding=to_sharding(entries, sharding.mesh))
