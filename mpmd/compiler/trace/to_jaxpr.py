"""Has JAX trace a step, and brings what it wrote into canonical form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.bodies import in_loops, with_marks_open
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.sharding_types import WithoutTypes
from mpmd.compiler.steps import TracedStep
from mpmd.compiler.trace.abstract_meshes import with_abstract_meshes
from mpmd.compiler.trace.check_loop import check_loop
from mpmd.compiler.trace.fed_back import find_fed_back
from mpmd.compiler.trace.ignore_marks import ignore_marks
from mpmd.compiler.trace.open_loops import find_open_loops
from mpmd.compiler.trace.traced_within import traced_within_submesh
from mpmd.compiler.trace.unequal_layers import unequal_layers
from mpmd.ir.plan import Spec
from mpmd.sharding import with_auto_axes
from mpmd.util.tracers import check_untraced
from mpmd.util.tree import argument_paths


def to_jaxpr(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    submeshes: Sequence[AbstractMesh],
    specs: Sequence[Spec | None] | None,
    donated: Sequence[bool] = (),
) -> TracedStep:
    """Has JAX trace ``fun(*args, **kwargs)``, within the first group's submesh.

    Args:
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      specs: how each leaf of them is sharded; ``None`` for one, or for all: replicated. Along explicit axes
        types say so.
      donated: for each leaf, whether the caller gives it up; none if none is.

    Raises: ``CompileError`` for loops that cannot be pipelined, for marks in them where no stage can
      end, and for scans over arrays of different sizes; whatever the step raises; and as ``check_untraced``.
    """
    try:
        closed, out_shape = traced_within_submesh(fun, args, kwargs, submeshes, specs)
    except ValueError as error:
        if (refused := unequal_layers(error, args, kwargs)) is None:
            raise
        raise refused from error
    untyped = WithoutTypes()
    jaxpr, constants = _canonical(closed, submeshes, untyped)
    check_untraced(("an array that the step closes over", constant) for constant in constants.values())
    check_loop(jaxpr)
    open_loops = find_open_loops(jaxpr)
    jaxpr, ignored_marks = ignore_marks(jaxpr)
    return TracedStep(
        jaxpr=jaxpr,
        constants=constants,
        argument_paths=argument_paths(args, kwargs),
        donated=tuple(donated) or (False,) * len(jaxpr.invars),
        out_shape=out_shape,
        fed_back_leaves=find_fed_back((*args, *kwargs.values()), jaxpr, out_shape, donated),
        explicit_specs=untyped.specs,
        ignored_marks=ignored_marks,
        open_loops=open_loops,
    )


def _canonical(
    closed: ClosedJaxpr, submeshes: Sequence[AbstractMesh], untyped: WithoutTypes
) -> tuple[Jaxpr, dict[Var, Any]]:
    """The step in canonical form, without rematerialised functions that have marks inside.

    Returns: a jaxpr of the arguments, and the values of the constants that it reads.
    """
    jaxpr, values = canonical(closed)
    jaxpr = in_loops(jaxpr, with_marks_open)
    jaxpr = untyped.jaxpr(jaxpr.replace(invars=[var for var in jaxpr.invars if var not in values]))
    values = {untyped.variable(var): value for var, value in values.items()}
    return with_abstract_meshes(jaxpr, [*map(with_auto_axes, submeshes)]), values
