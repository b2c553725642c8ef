"""Marks the end of a pipeline stage: the identity, with a direction that differentiation turns round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.interpreters import ad, batching, partial_eval

from mpmd.compat import api_boundary
from mpmd.language.identities import bind_to_tangents, identity
from mpmd.util.tree import with_leaves
from mpmd.validation import int_fault, int_faults, is_sequence, raise_faults, shown, str_fault

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, eq=False)
class Boundary:
    """One call of ``mark_stage_end``; marks that differentiation derives from it share it.

    Attributes:
      every, num_stages: the iterations of the scan around it after which a stage ends, as the user wrote it.
      in_scan: whether a mark in a scan made it, as one of several ends of stages.
      by_auto_marks: whether ``mpmd.auto_marks`` wrote it, at the end of a layer, and not the user.
      ends: of one that ``mpmd.auto_marks`` wrote, the layer after which the stage ends, as text.
      stage: the stage that ends there, once the compiler has numbered the marks of a loop.
    """

    name: str | None
    stage: int | None = None
    every: int | tuple[int, ...] | None = None
    num_stages: int | None = None
    in_scan: bool = False
    by_auto_marks: bool = False
    ends: tuple[str, ...] = ()
    _ends: dict[int, Boundary] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def end(self, number: int) -> Boundary:
        """One of the ends of stages that a mark in a scan makes; the same object for each call."""
        return self._ends.setdefault(number, Boundary(self.name, in_scan=True))

    @property
    def is_of_scan(self) -> bool:
        return self.every is not None or self.num_stages is not None

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"end of stage {self.stage}"
        return ", ".join(filter(None, (stage, self.name))) or "end of a stage"


mark_p = identity("stage_end")
"""Parameters: ``boundary``; ``forward``: the data flow from the stage to the next one rather than back;
``linear``: derived by differentiation, so it accompanies another mark and ends no stage of its own. A mark
that is neither is the user's, transposed by ``jax.linear_transpose``, and loops refuse it."""


@dataclasses.dataclass(frozen=True)
class Mark:
    boundary: Boundary
    forward: bool
    linear: bool


def mark_of(eqn: JaxprEqn) -> Mark | None:
    return Mark(**eqn.params) if eqn.primitive is mark_p else None


def bind_mark(values: Sequence[Any], boundary: Boundary) -> list[Any]:
    return mark_p.bind(*values, boundary=boundary, forward=True, linear=False)


def mark_text(eqn: JaxprEqn, line: str | None) -> str:
    if eqn.params["boundary"].by_auto_marks:
        called = f", called at {line}" if line else ""
        return f"the end of a stage that mpmd.plan or auto_marks(num_stages=...) has chosen{called},"
    return f"mark_stage_end at {line or 'an unknown line'}"


@api_boundary
def mark_stage_end(
    x: Tree,
    name: str | None = None,
    *,
    every: int | Sequence[int] | None = None,
    num_stages: int | None = None,
) -> Tree:
    """Marks the end of a pipeline stage.

    Everything that ``x`` depends on belongs to the stage that ends here, or to an earlier one; everything
    that depends on the result belongs to later stages. ``S`` stages have ``S - 1`` marks; one more, after the
    last stage, is allowed. Models that do not depend on one another, such as a student and its teacher, have
    marks of their own each, and pass through the same stages. A mark is the identity everywhere except in the
    loop of a step that ``mpmd.jit`` compiles.

    In the body of a ``jax.lax.scan`` over layers, ``x`` is the carry to the next layer. Stages end after
    whole iterations: after each one, unless ``every`` or ``num_stages`` says otherwise. Each group then
    holds, of the scanned arrays and of the values computed from these, the range of its own layers.

    Args:
      x: a pytree of arrays of any shape and dtype, usually the activations.
      name: shown in error messages.
      every: in a scan, the number of iterations of each stage, or a sequence with the number of each stage.
        ``None``: 1, unless ``num_stages`` is given.
      num_stages: in a scan, the number of stages that share its iterations, as evenly as possible; the first
        ones have one iteration more.

    Returns: ``x``.
    Raises: ``TypeError`` when ``x`` has no array, or when ``every`` or ``num_stages`` is no such number;
      ``ValueError`` when both are given, or are not positive.
    """
    leaves, treedef = jax.tree.flatten(x)
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
    if not arrays:
        raise TypeError(f"mark_stage_end needs a pytree with at least one array as x, got {shown(x)}")
    _check_ends(name, every, num_stages)
    each = tuple(every) if isinstance(every, Sequence) else every
    boundary = Boundary(name, every=each, num_stages=num_stages)
    marked = bind_mark([leaves[i] for i in arrays], boundary)
    return jax.tree.unflatten(treedef, with_leaves(leaves, arrays, marked))


def _check_ends(name: Any, every: Any, num_stages: Any) -> None:
    raise_faults(
        str_fault("name", name, optional=True),
        *(int_faults("every", every) if is_sequence(every) else [int_fault("every", every, optional=True)]),
        int_fault("num_stages", num_stages, optional=True),
        title="mark_stage_end: ",
    )
    if every is not None and num_stages is not None:
        raise ValueError(f"mark_stage_end takes every={every!r} or num_stages={num_stages!r}, not both")


pipeline_enter_stage = mark_stage_end
mark_pipeline_boundary = mark_stage_end


def _jvp(primals, tangents, **params):
    return mark_p.bind(*primals, **params), bind_to_tangents(mark_p, tangents, **params | {"linear": True})


def _transpose(cotangents, *args, forward, **params):
    return bind_to_tangents(mark_p, cotangents, forward=not forward, **params)


def _batch(args, dims, **params):
    return mark_p.bind(*args, **params), dims


ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = _batch


def _saved_by_remat(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn
) -> Any:
    """Makes ``jax.checkpoint`` keep the results of marks, whatever its policy.

    The input of a stage is kept, so no recomputation goes back into the stage before it.
    ``jax.interpreters.partial_eval`` documents such rules.

    Args:
      unknown: for each operand, whether the forward does not know it.
      instantiated: for each operand, whether the backward has it already.

    Returns: the equation of the forward; the equation of the backward; for each result, whether the forward
      does not know it; for each result, whether the backward computes it; further operands of the backward.
    """
    if not any(unknown):
        return _with_some_kept_apart(eqn)
    residuals = [
        atom
        for atom, is_there in zip(eqn.invars, instantiated, strict=True)
        if isinstance(atom, Var) and not is_there
    ]
    return None, eqn, [True] * len(unknown), [True] * len(unknown), residuals


def _with_some_kept_apart(eqn: JaxprEqn) -> Any:
    """As ``_saved_by_remat``, for a mark that the forward knows.

    JAX applies ``reduce_precision`` to floats that the backward keeps and the forward reads, too. That takes
    no complex values, and changes floats of 8 bits or less, such as the smallest ones of float8_e4m3fn. So
    the mark has further results for both, which only the backward reads.
    """
    are_apart = [_is_changed_by_reduce_precision(var.aval) for var in eqn.outvars]
    read = [atom for atom, is_apart in zip(eqn.invars, are_apart, strict=True) if is_apart]
    results = [var for var, is_apart in zip(eqn.outvars, are_apart, strict=True) if is_apart]
    kept = [Var(var.aval) for var in results]
    known = eqn.replace(invars=[*eqn.invars, *read], outvars=[*eqn.outvars, *kept])
    identity = jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0]
    restored = identity.replace(invars=kept, outvars=results, source_info=eqn.source_info)
    return known, restored if kept else None, [False] * len(are_apart), are_apart, kept


def _is_changed_by_reduce_precision(aval: Any) -> bool:
    is_narrow = jax.dtypes.issubdtype(aval.dtype, np.floating) and aval.dtype.itemsize == 1
    return is_narrow or jax.dtypes.issubdtype(aval.dtype, np.complexfloating)


partial_eval.partial_eval_jaxpr_custom_rules[mark_p] = _saved_by_remat
