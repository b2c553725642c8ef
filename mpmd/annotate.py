"""Marks the end of a pipeline stage: the identity, with a direction that differentiation turns round."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, eq=False)
class Boundary:
    """One call of ``mark_stage_end``; marks that differentiation derives from it share it.

    ``stage`` is the stage that ends there, once the compiler has numbered the marks of a loop.
    """

    name: str | None
    stage: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"end of stage {self.stage}"
        return ", ".join(filter(None, (stage, self.name))) or "end of a stage"


mark_p = Primitive("stage_end")
"""Parameters: ``boundary``; ``forward``: the data flow from the stage to the next one rather than back;
``linear``: derived by differentiation, so it accompanies another mark and ends no stage of its own."""
mark_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a mark in a jaxpr says: the parameters of ``mark_p``."""

    boundary: Boundary
    forward: bool
    linear: bool


def mark_of(eqn: JaxprEqn) -> Mark | None:
    """What an equation says, if it is a mark."""
    return Mark(**eqn.params) if eqn.primitive is mark_p else None


def mark_stage_end(x: Tree, name: str | None = None) -> Tree:
    """Marks the end of a pipeline stage.

    What ``x`` depends on belongs to the stage that ends here (or to an earlier one), what depends on the
    result belongs to later stages. ``S`` stages have ``S - 1`` marks; one more, after the last stage, is
    allowed. Models that do not depend on one another, as a student and its teacher, have marks of their own
    each, and pass the same stages. Anywhere but in the loop of a step compiled by ``mpmd_jit_with_loop`` a
    mark is the identity.

    Args:
      x: a pytree of arrays of any shape and dtype, usually the activations.
      name: shown in error messages.

    Returns: ``x``.
    Raises: ``TypeError`` when ``x`` has no array.
    """
    leaves, treedef = jax.tree.flatten(x)
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
    if not arrays:
        raise TypeError(f"mark_stage_end needs a pytree with at least one array, got {x!r}")
    marked = mark_p.bind(*(leaves[i] for i in arrays), boundary=Boundary(name), forward=True, linear=False)
    for i, leaf in zip(arrays, marked, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


pipeline_enter_stage = mark_stage_end
mark_pipeline_boundary = mark_stage_end


@mark_p.def_impl
def _impl(*args, **params):
    return args


@mark_p.def_abstract_eval
def _abstract_eval(*avals, **params):
    return avals


def _jvp(primals, tangents, *, boundary, forward, linear):
    out = mark_p.bind(*primals, boundary=boundary, forward=forward, linear=linear)
    # Integer, boolean and key leaves have symbolic-zero tangents and pass by.
    live = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    out_tangents = list(tangents)
    if live:
        marked = mark_p.bind(*(tangents[i] for i in live), boundary=boundary, forward=forward, linear=True)
        for i, tangent in zip(live, marked, strict=True):
            out_tangents[i] = tangent
    return out, out_tangents


def _transpose(cotangents, *args, boundary, forward, linear):
    live = [i for i, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    out: list = [None] * len(args)
    if live:
        marked = mark_p.bind(
            *(cotangents[i] for i in live), boundary=boundary, forward=not forward, linear=True
        )
        for i, cotangent in zip(live, marked, strict=True):
            out[i] = cotangent
    return out


def _batch(args, dims, **params):
    return mark_p.bind(*args, **params), dims


ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda ctx, *args, **params: args)
