"""Has JAX trace a step, and brings what it wrote into canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.bodies import in_loops
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.marks import has_mark
from mpmd.compiler.jaxprs.remat import with_remat_open
from mpmd.compiler.jaxprs.sharding_types import WithoutTypes
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.steps import TracedStep
from mpmd.compiler.trace.abstract_meshes import with_abstract_meshes
from mpmd.compiler.trace.check_loop import check_loop
from mpmd.compiler.trace.fed_back import find_fed_back
from mpmd.compiler.trace.ignore_marks import ignore_marks
from mpmd.compiler.trace.open_loops import find_open_loops
from mpmd.compiler.trace.traced_within import traced_within_submesh
from mpmd.compiler.trace.unequal_layers import unequal_layers
from mpmd.sharding import with_auto_axes
from mpmd.util.tracers import check_untraced
from mpmd.util.tree import argument_paths


def to_jaxpr(request: CompileRequest) -> TracedStep:
    """Has JAX trace a step for its arguments, within the first group's submesh.

    Raises: ``CompileError`` for loops that cannot be pipelined, for marks in them where no stage can
      end, and for scans over arrays of different sizes; whatever the step raises; and as ``check_untraced``.
    """
    args, kwargs = request.args, dict(request.kwargs)
    try:
        closed, out_shape = traced_within_submesh(request)
    except ValueError as error:
        if (refused := unequal_layers(error, args, kwargs)) is None:
            raise
        raise refused from error
    untyped = WithoutTypes()
    jaxpr, constants = _canonical(closed, request.submeshes, untyped)
    check_untraced(("an array that the step closes over", constant) for constant in constants.values())
    check_loop(jaxpr)
    open_loops = find_open_loops(jaxpr)
    jaxpr, ignored_marks = ignore_marks(jaxpr)
    return TracedStep(
        jaxpr=jaxpr,
        constants=constants,
        argument_paths=argument_paths(args, kwargs),
        donated=tuple(request.donated) or (False,) * len(jaxpr.invars),
        out_shape=out_shape,
        fed_back_leaves=find_fed_back((*args, *kwargs.values()), jaxpr, out_shape, request.donated),
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
    # Then the order of equations, kept and recomputed ones, follows the order of the stages.
    jaxpr = in_loops(jaxpr, lambda body: with_remat_open(body, has_mark))
    jaxpr = untyped.jaxpr(jaxpr.replace(invars=[var for var in jaxpr.invars if var not in values]))
    values = {untyped.variable(var): value for var, value in values.items()}
    return with_abstract_meshes(jaxpr, [*map(with_auto_axes, submeshes)]), values
