"""Compiles the function that makes an argument of a step, such as the state, on the groups that read it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.compiler.pipeline import CompiledStep, compile_step
from mpmd.errors import CompileError
from mpmd.ir.plan import Spec
from mpmd.meshes.mesh import GroupMesh
from mpmd.util.tree import paths


def compile_init(fun: Callable, call: Call, wanted: Any, mesh: GroupMesh) -> CompiledStep:
    """Compiles ``fun`` for a call of it, with its result where a step reads it.

    Args:
      wanted: the argument that the result is to be, a pytree with an ``ArgumentLeaf`` for each leaf.

    Raises: ``CompileError`` for a result that is not like the argument, and for a function with a loop.
    """
    args, kwargs = jax.tree.unflatten(call.treedef, call.avals)
    compiled = compile_step(
        fun=fun,
        args=args,
        kwargs=kwargs,
        submeshes=mesh.abstract_submeshes,
        donated=call.donated,
        out_specs=functools.partial(_specs_of, wanted),
        held=call.placements(mesh.runtime),
        wanted=[leaf.placement for leaf in jax.tree.leaves(wanted)],
    )
    if compiled.traced.loops:
        raise CompileError("the function that makes the state has a treduce, and so a place of its own")
    return compiled


def _specs_of(wanted: Any, out_shape: Any) -> list[Spec]:
    """The specs of the result leaves. Raises ``CompileError`` naming all that are not like the argument's."""
    leaves: list[ArgumentLeaf] = jax.tree.leaves(wanted)
    if faults := list(_faults(wanted, leaves, out_shape)):
        raise CompileError(faults)
    return [leaf.spec for leaf in leaves]


def _faults(wanted: Any, leaves: list[ArgumentLeaf], out_shape: Any) -> Iterator[str]:
    made = dict(zip(paths(out_shape), jax.tree.leaves(out_shape), strict=True))
    read = dict(zip(paths(wanted), leaves, strict=True))
    for path, leaf in read.items():
        if path not in made:
            yield f"the step reads {leaf.path}, but the function makes no result{path}"
        elif (it := _type(made[path])) != _type(leaf.aval):
            yield f"the step reads {leaf.path} as {_type(leaf.aval)}, but the function makes {it}"
    yield from (f"the step has no place for result{path}" for path in made if path not in read)
    here: Any = jax.tree.structure(wanted)
    there: Any = jax.tree.structure(out_shape)
    if made.keys() == read.keys() and here != there:
        yield f"the step reads an argument of the structure {here}, but the function makes {there}"


def _type(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}{list(aval.shape)}"
