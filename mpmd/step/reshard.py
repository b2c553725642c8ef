"""Copies arrays from the groups that hold them to the groups that read them, from any layout to any other.

A copy is a function without a loop over the whole mesh. Its arguments are the held layer ranges, its results
the read layer ranges: a holder slices its range and sends the slices, and a reader concatenates slices. So a
byte travels once, from its holder to its reader, and never to the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from mpmd.arguments.call import check_argnum
from mpmd.arguments.leaves import ArgumentLeaf, describe, fault_of
from mpmd.arguments.signature import CallSignature
from mpmd.arrays.array import MpmdArray, placement_on, to_host
from mpmd.arrays.stacked_array import StackedMpmdArray
from mpmd.compat import api_boundary
from mpmd.compiler.pipeline import compile_step
from mpmd.compiler.request import CompileRequest
from mpmd.ir.placement import Placement
from mpmd.ir.plan import Spec
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.meshes.part import PartMesh
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.step_meter import StepMeter
from mpmd.step.jit import MpmdFunction
from mpmd.step.loaded_step import LoadedStep
from mpmd.util.tables import first_few
from mpmd.util.tree import compare, named_leaves, paths
from mpmd.validation import raise_faults, shown, type_fault

_Copies = weakref.WeakKeyDictionary[Runtime, dict[Hashable, LoadedStep]]
_COMPILED: weakref.WeakKeyDictionary[LoadedStep | PartMesh, _Copies]
_COMPILED = weakref.WeakKeyDictionary()
"""For steps and parts, the compiled copies to them, which refer to the whole mesh alone."""


@api_boundary
def reshard(
    tree: Any,
    to: LoadedStep | MpmdFunction | PartMesh | Any,
    argnum: int | str = 0,
    *,
    dtype: Any = None,
) -> Any:
    """Copies a pytree of arrays to where a step reads an argument: from any layout to any other.

    The layouts may differ in groups, shardings and the cut of stacked layers. Groups send one another the
    slices that differ, each byte once, after the steps submitted before; the driver sends only arrays of this
    process. Returns at once. The originals stay. If the copy fails, reading any of the results raises why.

    Args:
      tree: a pytree of ``MpmdArray``s, and of arrays of this process.
      to: a compiled step, or a function of ``mpmd.jit`` that was compiled once, whose argument the result
        becomes; a part of a mesh, each of whose groups gets all arrays, replicated; or a
        ``jax.sharding.Sharding`` over devices of this process, or a pytree prefix of shardings, for ordinary
        jax arrays: then the call waits for the values.
      argnum: the position or the name of the step's argument.
      dtype: the dtype of the copies of floating-point arrays, which the holders cast; by default the arrays'
        own.

    Returns: the pytree, of ``MpmdArray``s; of jax arrays for shardings.
    Raises: ``ValueError`` naming the leaves that the step reads with another shape or dtype, that only one of
      the two has, or that another mesh holds; ``TypeError`` for another ``to``; and as
      ``step.argument_leaves``.
    """
    dtype = _floating_dtype(dtype)
    _check_arrays(tree)
    if isinstance(to, MpmdFunction):
        to = to.only_step
    if isinstance(to, LoadedStep):
        check_argnum(argnum)
        return _copied(tree, to.argument_leaves(argnum), dtype, to.mesh.whole, to)
    if isinstance(to, PartMesh):
        return _copied(tree, _replicated(tree, dtype, to), dtype, to.whole, to)
    is_sharding = [isinstance(leaf, jax.sharding.Sharding) for leaf in jax.tree.leaves(to)]
    if not is_sharding or not all(is_sharding):
        what = "a compiled step, a part of a mesh, or jax shardings"
        raise_faults(type_fault("to", to, LoadedStep | PartMesh, what), title="mpmd.reshard: ")
    return jax.device_put(jax.tree.map(lambda leaf: _cast(leaf, dtype), to_host(tree)), to)


def _floating_dtype(dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if jnp.issubdtype(floating := jnp.dtype(dtype), jnp.floating):
            return floating
    raise TypeError(
        f"mpmd.reshard: dtype must be a floating-point dtype, such as jnp.bfloat16, not {shown(dtype)}"
    )


def _replicated(tree: Any, dtype: Any, part: PartMesh) -> Any:
    placement = Placement(part.mpmd_idxs, ())
    names = iter(paths(tree))
    return jax.tree.map(lambda leaf: ArgumentLeaf(next(names), _cast_aval(leaf, dtype), placement), tree)


def _copied(tree: Any, target: Any, dtype: Any, mesh: GroupMesh, owner: LoadedStep | PartMesh) -> Any:
    """The copy of a pytree.

    Args:
      target: the pytree with an ``ArgumentLeaf`` for each leaf.
      mesh: the whole mesh.
      owner: while this object lives, equal copies are compiled once.
    """
    runtime = mesh.runtime
    raise_faults(*_faults(tree, target, dtype, runtime), title="mpmd.reshard: ")
    leaves, treedef = jax.tree.flatten(_known_to_driver(tree, target, runtime))
    copies = tuple(
        LeafCopy(describe(leaf), placement_on(leaf, runtime), read.placement, read.aval)
        for leaf, read in zip(leaves, jax.tree.leaves(target), strict=True)
    )
    held = [[*leaf.parts] if copy.held.stack else [leaf] for leaf, copy in zip(leaves, copies, strict=True)]
    signature = CallSignature.of(functools.partial(_copy_ranges, copies))
    call = signature.bind((held,), {})
    compiled = _COMPILED.setdefault(owner, weakref.WeakKeyDictionary()).setdefault(runtime, {})
    key = (call.key, copies)
    if key not in compiled:
        meter = StepMeter("reshard", mesh)
        with jax.enable_x64(True):  # so that no value is narrowed
            step = compile_step(copy_request(copies, mesh.abstract_submeshes))
            compiled[key] = LoadedStep(step, call.described_by(call.avals), mesh, signature, meter)
    ranges = compiled[key].submit(call)[0]
    return jax.tree.unflatten(treedef, map(LeafCopy.joined, copies, ranges))


def _known_to_driver(tree: Any, target: Any, runtime: Runtime) -> Any:
    """The pytree with the values of arrays from groups that do not recover to groups that do.

    These run their steps again after a death, with values that the former may not have any more.
    """
    left_out = runtime.left_out

    def known(leaf: Any, read: ArgumentLeaf) -> Any:
        is_left_out = not left_out.isdisjoint(placement_on(leaf, runtime).mpmd_idxs)
        return to_host(leaf) if is_left_out and left_out.isdisjoint(read.placement.mpmd_idxs) else leaf

    return jax.tree.map(known, tree, target) if left_out else tree


def _copy_ranges(copies: Sequence[LeafCopy], held: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
    return [copy.of(ranges) for copy, ranges in zip(copies, held, strict=True)]


def copy_request(copies: Sequence[LeafCopy], submeshes: Sequence[AbstractMesh]) -> CompileRequest:
    held = [placement for copy in copies for placement in copy.held.ranges]
    read = [placement for copy in copies for placement in copy.read.ranges]
    specs: list[Spec | None] = [placement.spec or () for placement in read]
    return CompileRequest(
        fun=functools.partial(_copy_ranges, copies),
        args=([copy.held_avals for copy in copies],),
        kwargs={},
        submeshes=submeshes,
        in_specs=[placement.spec for placement in held],
        are_asked=[False] * len(held),
        out_specs=lambda _: specs,
        argument_placements=held,
        result_placements=read,
    )


@dataclasses.dataclass(frozen=True)
class LeafCopy:
    """The copy of a leaf.

    Attributes:
      held_aval: its shape and dtype.
      held: its groups, its spec and its cut; ``ANYWHERE``: the driver sends it.
      read: the groups, the spec and the cut that the copy is to have.
      aval: the shape and dtype that it is to have.
    """

    held_aval: jax.ShapeDtypeStruct
    held: Placement
    read: Placement
    aval: jax.ShapeDtypeStruct

    @property
    def held_avals(self) -> list[jax.ShapeDtypeStruct]:
        if self.held.stack is None:
            return [self.held_aval]
        shapes = self.held.stack.shapes(self.held_aval.shape)
        return [jax.ShapeDtypeStruct(shape, self.held_aval.dtype) for shape in shapes]

    def of(self, ranges: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the read layer ranges, cut and concatenated from the held ``ranges``."""
        ranges = [_cast(layers, self.aval.dtype) for layers in ranges]
        if self.held.stack == self.read.stack:
            return ranges
        return [
            jnp.concatenate(pieces, self._axis) if len(pieces) > 1 else pieces[0]
            for pieces in self._pieces(ranges)
        ]

    def joined(self, ranges: Sequence[MpmdArray]) -> MpmdArray:
        if self.read.stack is None:
            return ranges[0]
        return StackedMpmdArray(self.aval, self.read.stack, tuple(ranges))

    @property
    def _axis(self) -> int:
        stack = self.held.stack or self.read.stack
        assert stack is not None, "equal cuts were copied as they are"
        return stack.axis

    def _pieces(self, ranges: Sequence[jax.Array]) -> Iterator[list[jax.Array]]:
        axis, held_stack, read_stack = self._axis, self.held.stack, self.read.stack
        if held_stack and read_stack and held_stack.axis != read_stack.axis:
            for layers in read_stack.slices:
                yield [_layers(each, layers.start, layers.stop, read_stack.axis) for each in ranges]
            return
        whole = (slice(0, self.aval.shape[axis]),)
        held = held_stack.slices if held_stack else whole
        for read in read_stack.slices if read_stack else whole:
            overlaps = [
                (layers, max(read.start, here.start) - here.start, min(read.stop, here.stop) - here.start)
                for layers, here in zip(ranges, held, strict=True)
            ]
            yield [_layers(layers, start, stop, axis) for layers, start, stop in overlaps if start < stop]


def _layers(array: jax.Array, start: int, stop: int, axis: int) -> jax.Array:
    """Some layers of an array; the array itself where they are all, which needs no equation."""
    if stop - start == array.shape[axis]:
        return array
    return jax.lax.slice_in_dim(array, start, stop, axis=axis)


def _cast(value: Any, dtype: Any) -> Any:
    if dtype is None or (aval := describe(value)).dtype == dtype:
        return value
    return jnp.asarray(value, dtype) if jnp.issubdtype(aval.dtype, jnp.floating) else value


def _cast_aval(leaf: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    aval = describe(leaf)
    if dtype is None or not jnp.issubdtype(aval.dtype, jnp.floating):
        return aval
    return jax.ShapeDtypeStruct(aval.shape, dtype)


def _check_arrays(tree: Any) -> None:
    texts = [fault_of(path, leaf) for path, leaf in named_leaves("tree", tree)]
    raise_faults(*(TypeError(text) for text in texts if text), title="mpmd.reshard: ")


def _faults(tree: Any, target: Any, dtype: Any, runtime: Runtime) -> Iterator[ValueError]:
    for path, leaf in named_leaves("tree", tree):
        if isinstance(leaf, MpmdArray) and leaf.runtime is not runtime:
            yield ValueError(
                f"{path} is on another mesh, or on this one before it was closed; mpmd.to_host fetches it"
            )
        elif isinstance(leaf, jax.Array) and leaf.is_deleted():
            yield ValueError(f"{path} was deleted or donated to a step; pass that step's result")
    yield from map(ValueError, _differences(tree, target, dtype))


def _differences(tree: Any, target: Any, dtype: Any) -> Iterator[str]:
    compared = compare(tree, target)
    if compared.only_there:
        yield f"the step reads {_named(compared.only_there)}, which the tree lacks"
    if compared.only_here:
        yield f"the tree has {_named(compared.only_here)}, which the step does not read"
    for path, (leaf, read) in compared.both.items():
        aval, expected = _cast_aval(leaf, dtype), read.aval
        if aval.shape != expected.shape:
            shapes = f"{list(aval.shape)}, and {read.path} of {list(expected.shape)}"
            yield f"tree{path} is of shape {shapes}"
        elif aval.dtype != expected.dtype:
            yield (
                f"tree{path} is {aval.dtype}, and {read.path} is {expected.dtype}: "
                f"dtype=jnp.{expected.dtype} casts all floating-point arrays on the way"
            )
    if compared.structures:
        here, there = compared.structures
        yield f"the tree has the structure {here}, and the step reads {there}"


def _named(leaf_paths: Iterable[str]) -> str:
    return first_few(f"tree{path}" for path in sorted(leaf_paths))
