"""Has JAX trace a step, and brings its jaxpr into canonical form."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import operands
from mpmd.compiler.jaxprs.marks import has_mark, in_loops
from mpmd.compiler.jaxprs.remat import with_remat_open
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.steps import TracedStep
from mpmd.compiler.trace.check_loop import check_loop
from mpmd.compiler.trace.fed_back import find_fed_back
from mpmd.compiler.trace.ignore_marks import ignore_marks
from mpmd.compiler.trace.over_submeshes import OverSubmeshes
from mpmd.compiler.trace.traced_within import traced_within_submesh
from mpmd.compiler.trace.unequal_layers import unequal_layers
from mpmd.errors import CompileError
from mpmd.language.pieces import open_rows_p
from mpmd.language.reduce import treduce_p
from mpmd.util.tracers import check_untraced
from mpmd.util.tree import argument_paths, named_leaves


def to_jaxpr(request: CompileRequest) -> TracedStep:
    """Has JAX trace a step for its arguments, within the first group's submesh.

    Raises: ``CompileError`` for loops that cannot be pipelined, for marks in them where no stage can
      end, for scans over arrays of different sizes, and for results without a value; whatever the
      step raises; and as ``check_untraced``.
    """
    args, kwargs = request.args, dict(request.kwargs)
    try:
        closed, out_shape = traced_within_submesh(request)
    except ValueError as error:
        if (refused := unequal_layers(error, args, kwargs)) is None:
            raise
        raise refused from error
    _check_results(out_shape)
    moving = OverSubmeshes(request.submeshes)
    jaxpr, constants = _canonical(closed, moving)
    check_untraced(("an array that the step closes over", constant) for constant in constants.values())
    check_loop(jaxpr)
    open_loops = _find_open_loops(jaxpr)
    jaxpr, ignored_marks = ignore_marks(jaxpr)
    return TracedStep(
        jaxpr=jaxpr,
        constants=constants,
        argument_paths=argument_paths(args, kwargs),
        donated=tuple(request.donated) or (False,) * len(jaxpr.invars),
        out_shape=out_shape,
        fed_back_leaves=find_fed_back((*args, *kwargs.values()), jaxpr, out_shape, request.donated),
        explicit_specs=moving.specs,
        ignored_marks=ignored_marks,
        open_loops=open_loops,
    )


def _check_results(out_shape: Any) -> None:
    leaves = named_leaves("result", out_shape)
    if of_integers := [path for path, leaf in leaves if leaf.dtype == jax.dtypes.float0]:
        raise CompileError(
            f"{', '.join(of_integers)}: a gradient of integers (float0), which has no value; return the "
            "other gradients only"
        )


def _canonical(closed: ClosedJaxpr, moving: OverSubmeshes) -> tuple[Jaxpr, dict[Var, Any]]:
    """The step in canonical form, without rematerialised functions that have marks inside.

    Returns: a jaxpr of the arguments, and the values of the constants that it reads.
    """
    jaxpr, values = canonical(closed)
    # Then the order of equations, kept and recomputed ones, follows the order of the stages.
    jaxpr = in_loops(jaxpr, lambda body: with_remat_open(body, has_mark))
    jaxpr = moving.step(jaxpr.replace(invars=[var for var in jaxpr.invars if var not in values]))
    return jaxpr, {moving.variable(var): value for var, value in values.items()}


def _find_open_loops(jaxpr: Jaxpr) -> frozenset[int]:
    """Returns the decision indices of loops that read rows which are cut into an open number of microbatches.

    What a loop returns is read by a later loop as any other value, whatever the number.
    """
    rows: set[Var] = set()
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        reads_rows = not rows.isdisjoint(operands(eqn))
        if eqn.primitive is treduce_p:
            found |= {eqn.params["number"]} if reads_rows else set()
        elif reads_rows or eqn.primitive is open_rows_p:
            rows.update(eqn.outvars)
    return frozenset(found)
