"""The function of a step as plain JAX traces it: ``step.trace``, and steps in other traces of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpmd.step.lowered_step import LoweredStep


class TracedFunction(NamedTuple):
    """The result of ``step.trace(...)``: a ``jax.stages.Traced``, whose ``lower()`` plans the step."""

    traced: jax.stages.Traced
    lower: Callable[[], LoweredStep]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)


def described(traced: TracedFunction, args: tuple, kwargs: dict[str, Any], refused: TypeError) -> Any:
    """The result of a step that is called with traced arrays, of which only shapes and dtypes are known.

    ``jax.eval_shape`` and ``jax.make_jaxpr`` need no more. Every other transformation raises ``refused``.
    """
    traced_leaves = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.core.Tracer)]
    results = step_p.bind(*traced_leaves, jaxpr=traced.jaxpr, refused=refused)
    return jax.tree.unflatten(traced.out_tree, results)


step_p = Primitive("mpmd_step")
"""A call of a step, which nothing but groups can run."""
step_p.multiple_results = True


@step_p.def_abstract_eval
def _abstract_eval(*avals, jaxpr, refused):
    return jaxpr.out_avals


@step_p.def_impl
def _refuse(*operands, jaxpr, refused):
    raise refused


ad.primitive_jvps[step_p] = _refuse
batching.primitive_batchers[step_p] = _refuse
mlir.register_lowering(step_p, _refuse)
