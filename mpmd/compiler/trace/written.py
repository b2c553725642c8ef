"""Has JAX trace a step, and opens the calls in it, which is the step as its user wrote it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import AbstractMesh

from mpmd.compat import with_constants_as_inputs
from mpmd.compiler.cut_layers import (
    has_marked_scan,
    in_loops,
    with_calls_open,
    with_marks_open,
    with_own_variables,
)
from mpmd.compiler.jaxprs.equations import inline_calls
from mpmd.compiler.jaxprs.sharding_types import WithoutTypes
from mpmd.compiler.trace.abstract_meshes import with_abstract_meshes
from mpmd.compiler.trace.carried_state import find_carried_state
from mpmd.compiler.trace.check_loop import check_loop
from mpmd.compiler.trace.host_callbacks import has_callback
from mpmd.compiler.trace.ignore_marks import ignore_marks
from mpmd.compiler.trace.traced_within import traced_within_submesh
from mpmd.compiler.trace.unequal_layers import unequal_layers
from mpmd.ir.plan import Spec
from mpmd.language.reduce import treduce_p
from mpmd.sharding import with_auto_axes
from mpmd.util.tracers import check_untraced
from mpmd.util.tree import argument_paths


@dataclasses.dataclass(frozen=True)
class WrittenStep:
    """A step as it is written.

    Attributes:
      jaxpr: of the leaves of its arguments, with the calls outside of loops inlined.
      constants: the values of the variables that it reads besides.
      typed: the specs of variables whose types said how they are sharded.
      argument_paths: what its user calls the arguments.
      out_shape: its result as a pytree.
      carried_leaves: pairs of an argument's and a result's position that a training loop will connect.
    """

    jaxpr: Jaxpr
    constants: Mapping[Var, Any]
    typed: Mapping[Var, Spec]
    argument_paths: tuple[str, ...]
    out_shape: Any
    carried_leaves: tuple[tuple[int, int], ...]

    @property
    def has_loop(self) -> bool:
        return has_loop(self.jaxpr)


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether a step, with calls inlined, has a microbatch loop."""
    return any(eqn.primitive is treduce_p for eqn in jaxpr.eqns)


def write_down(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    submeshes: Sequence[AbstractMesh],
    specs: Sequence[Spec | None] | None,
    donated: Sequence[bool] = (),
) -> WrittenStep:
    """Has JAX trace ``fun(*args, **kwargs)``, for arguments as of ``trace``.

    Raises: ``CompileError`` for loops that cannot be pipelined, for marks where no stage can end, and for
      scans over arrays of different sizes; whatever the step raises; and as ``check_untraced``.
    Warns: ``PerformanceWarning`` for marks without a loop.
    """
    try:
        closed, out_shape = traced_within_submesh(fun, args, kwargs, submeshes, specs)
    except ValueError as error:
        if (refused := unequal_layers(error, args, kwargs)) is None:
            raise
        raise refused from error
    untyped = WithoutTypes()
    jaxpr, constants = _inlined(closed, submeshes, untyped)
    check_untraced(("an array that the step closes over", constant) for constant in constants.values())
    check_loop(jaxpr)
    if not has_loop(jaxpr):
        jaxpr = ignore_marks(jaxpr)
    return WrittenStep(
        jaxpr=jaxpr,
        constants=constants,
        typed=untyped.specs,
        argument_paths=argument_paths(args, kwargs),
        out_shape=out_shape,
        carried_leaves=find_carried_state((*args, *kwargs.values()), jaxpr, out_shape, donated),
    )


def _inlined(
    closed: ClosedJaxpr, submeshes: Sequence[AbstractMesh], untyped: WithoutTypes
) -> tuple[Jaxpr, dict[Var, Any]]:
    """The step without calls outside of loops and, in loops, without those with marks or callbacks inside.

    Rematerialised functions with marks inside count as calls in loops.

    Returns: a jaxpr of the arguments, and the values of the constants that it reads.
    """
    jaxpr = with_constants_as_inputs(closed)
    values = dict(zip(jaxpr.invars, closed.consts, strict=False))
    jaxpr, hoisted = inline_calls(jaxpr, lambda eqn: True)
    values |= hoisted
    jaxpr, _ = in_loops(jaxpr, lambda body: (with_own_variables(body), {}))
    jaxpr, hoisted = in_loops(jaxpr, with_marks_open)
    values |= hoisted
    jaxpr, hoisted = in_loops(jaxpr, lambda body: inline_calls(body, has_callback))
    values |= hoisted
    if has_marked_scan(jaxpr):  # it is cut, for which all calls are opened: here, their values have types
        jaxpr, hoisted = in_loops(jaxpr, with_calls_open)
        values |= hoisted
    jaxpr = untyped.jaxpr(jaxpr.replace(invars=[var for var in jaxpr.invars if var not in values]))
    values = {untyped.variable(var): value for var, value in values.items()}
    return with_abstract_meshes(jaxpr, [*map(with_auto_axes, submeshes)]), values
