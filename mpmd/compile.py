"""The compiler: its passes, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Var

from mpmd.graph import TracedStep
from mpmd.ir import Spec
from mpmd.liveness import add_frees_and_donations
from mpmd.lower import lower
from mpmd.mesh import GroupMesh
from mpmd.place import place
from mpmd.program import Program
from mpmd.specs import infer_specs
from mpmd.split import split
from mpmd.trace import trace
from mpmd.verify import Verified, verify


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to be loaded: what was traced, the program, and what was proven of it."""

    traced: TracedStep
    program: Program
    verified: Verified


def compile_step(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    mesh: GroupMesh,
    in_specs: Sequence[Spec] | None,
    out_specs: Sequence[Spec | None] | None,
    donated: Sequence[bool],
) -> CompiledStep:
    """Compiles a step for a mesh.

    Args:
      fun: the step; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      in_specs: for each argument leaf how it is sharded within a group; ``None``: everything is replicated.
      out_specs: the same for result leaves, of which those that are ``None`` are left to the compiler.
      donated: for each argument leaf, whether the caller gives it up.

    Raises: ``CompileError``.
    """
    submesh = mesh.abstract_submesh
    traced = trace(fun, args, dict(kwargs), submesh)
    placed = place(split(traced), mesh.mpmd_dim)
    is_open = submesh.size > 1 and (in_specs is not None or out_specs is not None)
    known = _known_specs(traced, in_specs, out_specs) if is_open else {}
    specs = infer_specs(placed.graph.outer, known)
    if is_open:
        for accumulator in placed.graph.accumulators:
            # An accumulator goes into the task that updates it as it comes out.
            spec = specs.get(accumulator.result, ())
            specs |= dict.fromkeys((accumulator.initial, accumulator.before, accumulator.after), spec)
            specs[accumulator.result] = spec
    program = lower(placed, specs, None if is_open else (), donated, mesh.mpmd_dim)
    program = dataclasses.replace(program, plan=add_frees_and_donations(program.plan))
    return CompiledStep(traced, program, verify(program.plan))


def _known_specs(
    traced: TracedStep, in_specs: Sequence[Spec] | None, out_specs: Sequence[Spec | None] | None
) -> dict[Var, Spec]:
    arguments = traced.jaxpr.invars
    results = [atom for atom in traced.jaxpr.outvars if isinstance(atom, Var)]
    known: dict[Var, Spec] = dict(zip(arguments, in_specs or [()] * len(arguments), strict=True))
    known |= dict.fromkeys(traced.jaxpr.constvars, ())
    for argument, result in traced.fed_back:
        known.setdefault(results[result], known[arguments[argument]])
    for var, spec in zip(results, out_specs or [None] * len(results), strict=True):
        if spec is not None and var not in arguments:
            known[var] = spec
    return known
