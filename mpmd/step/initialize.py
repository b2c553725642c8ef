"""Compiles the function that makes an argument of a step, such as the state, on the groups that read it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.compiler.pipeline import CompiledStep, compile_step
from mpmd.compiler.request import CompileRequest
from mpmd.errors import CompileError
from mpmd.ir.plan import Spec
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.util.tree import compare


def compile_init(fun: Callable, call: Call, argument: Any, mesh: GroupMesh) -> CompiledStep:
    """Compiles ``fun`` for one call, with its result on the groups that read it.

    Args:
      argument: the argument that the result becomes, a pytree with an ``ArgumentLeaf`` for each leaf.

    Raises: ``CompileError`` for a result that is not like the argument, and for a function with a loop.
    """
    args, kwargs = jax.tree.unflatten(call.treedef, call.avals)
    held = call.placements(mesh.runtime)
    request = CompileRequest(
        fun=fun,
        args=args,
        kwargs=kwargs,
        submeshes=mesh.abstract_submeshes,
        donated=call.donated,
        in_specs=[placement.spec for placement in held],
        are_asked=[False] * len(held),
        out_specs=functools.partial(_specs_of, argument),
        argument_placements=held,
        result_placements=[leaf.placement for leaf in jax.tree.leaves(argument)],
    )
    compiled = compile_step(request)
    if compiled.step.loops:
        raise CompileError("the function that makes the state has a treduce, and so a place of its own")
    return compiled


def _specs_of(argument: Any, out_shape: Any) -> list[Spec]:
    leaves: list[ArgumentLeaf] = jax.tree.leaves(argument)
    if faults := list(_faults(argument, out_shape)):
        raise CompileError(faults)
    return [leaf.spec for leaf in leaves]


def _faults(argument: Any, out_shape: Any) -> Iterator[str]:
    compared = compare(argument, out_shape)
    for path, leaf in compared.only_here.items():
        yield f"the step reads {leaf.path}, but the function makes no result{path}"
    for leaf, result in compared.both.values():
        if (it := _type(result)) != _type(leaf.aval):
            yield f"the step reads {leaf.path} as {_type(leaf.aval)}, but the function makes {it}"
    yield from (f"the step has no place for result{path}" for path in compared.only_there)
    if compared.structures:
        here, there = compared.structures
        yield f"the step reads an argument of the structure {here}, but the function makes {there}"


def _type(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}{list(aval.shape)}"
