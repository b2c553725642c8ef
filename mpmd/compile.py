"""The compiler: its passes, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import AbstractMesh

from mpmd.graph import PlacedGraph, TracedStep
from mpmd.ir import Spec
from mpmd.jaxpr import aval_of, avals_of
from mpmd.liveness import add_frees_and_donations
from mpmd.lower import lower
from mpmd.mesh import GroupMesh
from mpmd.place import place
from mpmd.program import Program
from mpmd.specs import infer_specs
from mpmd.split import split
from mpmd.timing import Stopwatch
from mpmd.trace import trace
from mpmd.verify import Verified, verify


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to be loaded: what was traced, the program, and what was proven of it.

    ``seconds`` has how long each pass took; ``jax`` is the step itself, as JAX traces it.
    """

    traced: TracedStep
    program: Program
    verified: Verified
    seconds: Mapping[str, float]


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Lets equations pile up undisturbed: a collection looks at each of them again, and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def compile_step(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    mesh: GroupMesh,
    in_specs: Sequence[Spec] | None,
    out_specs: Callable[[Any], Sequence[Spec | None]] | None,
    donated: Sequence[bool],
) -> CompiledStep:
    """Compiles a step for a mesh.

    Args:
      fun: the step; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      in_specs: for each argument leaf how it is sharded within a group; ``None``: everything is replicated.
      out_specs: the same for result leaves, given the shape of the result; those that are ``None`` are left
        to the compiler.
      donated: for each argument leaf, whether the caller gives it up.

    Raises: ``CompileError``.
    """
    watch = Stopwatch()
    submesh = mesh.abstract_submesh
    with watch("trace"):
        traced = _trace_as_fed_back(watch.timed("jax", fun), args, dict(kwargs), submesh)
    known = _known_specs(traced, in_specs, out_specs(traced.out_shape) if out_specs else None)
    with watch("split"):
        graph = split(traced)
    with watch("place"):
        placed = place(graph, mesh.mpmd_dim)
    with watch("lower"):
        specs = _specs(placed, known)
        is_open = submesh.size > 1 and (in_specs is not None or out_specs is not None)
        program = lower(placed, specs, None if is_open else (), donated, mesh.mpmd_dim)
        program = dataclasses.replace(program, plan=add_frees_and_donations(program.plan))
    with watch("verify"):
        verified = verify(program.plan)
    return CompiledStep(traced, program, verified, watch.seconds)


def _trace_as_fed_back(
    fun: Callable, args: tuple, kwargs: dict[str, Any], submesh: AbstractMesh
) -> TracedStep:
    """Traces the step with the state as the step itself returns it, so that all calls are alike.

    Arrays made of Python numbers, such as ``jnp.full(3, 0.1)``, have a weak type at first and, once updated,
    no longer. The difference only matters where dtypes mix; where it does, the step is traced as it was
    called, and the second call compiles again, as under ``jax.jit``.
    """
    traced = trace(fun, args, kwargs, submesh)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arguments, results = avals_of(traced.jaxpr.invars), avals_of(traced.jaxpr.outvars)
    weak = [i for i, j in traced.fed_back if arguments[i].weak_type and not results[j].weak_type]
    if not weak:
        return traced
    for i in weak:
        leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype)
    args, kwargs = jax.tree.unflatten(treedef, leaves)
    strong = trace(fun, args, kwargs, submesh)
    return strong if _dtypes(strong) == _dtypes(traced) else traced


def _dtypes(traced: TracedStep) -> list[Any]:
    """The dtypes of all that a step computes, other than by conversions that change weak types alone."""
    eqns = (*traced.jaxpr.eqns, *traced.loop.params["body"].eqns)
    return [
        aval.dtype
        for eqn in eqns
        for aval in avals_of(eqn.outvars)
        if eqn.primitive.name != "convert_element_type" or aval.dtype != aval_of(eqn.invars[0]).dtype
    ]


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


def _specs(placed: PlacedGraph, known: Mapping[Var, Spec]) -> dict[Var, Spec]:
    """The specs of variables outside the loop, as far as known, and of accumulators."""
    specs = infer_specs(placed.graph.outer, known)
    for a in placed.graph.accumulators:
        # An accumulator goes into the task that updates it as it comes out.
        specs |= dict.fromkeys((a.initial, a.before, a.after, a.result), specs.get(a.result, ()))
    return specs
