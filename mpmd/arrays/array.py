"""Results of a step: arrays that stay on the groups until someone looks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mpmd.arrays.delegation import delegate_to_value
from mpmd.compat import api_boundary, key_impl, register_array_type, with_weak_type
from mpmd.ir.placement import ANYWHERE, Placement
from mpmd.ir.plan import Spec
from mpmd.ir.specs import fitting
from mpmd.ir.stack import Stack
from mpmd.keys import decode, is_key
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import INLINE_BYTES, Handle
from mpmd.runtime.step_future import StepFuture
from mpmd.sharding import is_explicit, to_sharding


class Copy(NamedTuple):
    """The value of an array on one of the groups that hold it.

    Attributes:
      value: in process the group's own array; a numpy array from groups in other processes.
      sharding: over the submesh of the group's devices in process; over the submesh's shape otherwise.
    """

    value: jax.Array | np.ndarray
    sharding: jax.sharding.Sharding


class Held(NamedTuple):
    """A value of groups that an array stands for.

    Attributes:
      placement: the groups that hold the value, and its spec, which is not open.
      submeshes: the shapes of the submeshes of the groups in ``placement``.
      handle: the number by which the groups know the value.
      future: the step, or the read from storage, that makes the value.
    """

    placement: Placement
    submeshes: tuple[AbstractMesh, ...]
    handle: Handle
    future: StepFuture


class _Donation(NamedTuple):
    """A value that a step has taken over, and that comes back if the step fails."""

    future: StepFuture
    held: Held


_MOST_SHOWN = 8


@delegate_to_value
class MpmdArray(jax.Array):
    """An array on one or more groups, with the same spec over the submesh of each, if it divides there.

    It exists at once, like the result of a function under ``jax.jit``: the step that computes it may still
    run. It is a ``jax.Array``: a function that reads the value, such as ``np.asarray``, ``float``, arithmetic
    and JAX's functions, waits for it, fetches it, and raises the error of its step, ``TaskError`` or
    ``GroupDiedError``. Their results are ordinary arrays of this process. To compute on the groups of the
    array, use ``mpmd.jit``; ``mpmd.to_host`` fetches the arrays of a pytree together.

    Attributes:
      shape, dtype, weak_type: of the logical array.
      mpmd_idxs: the groups that hold it; all have the same value.
      spec: a ``PartitionSpec`` over a group's submesh.
      submeshes: the shapes of the submeshes of ``mpmd_idxs``; ``submesh`` is the first shape.
      stack: its cut into layer ranges; ``None``: it is one value.
      sharding: the sharding of the value that JAX's functions get, on the default device of this process.
    """

    __array_priority__ = 100  # as of other jax arrays: numpy leaves arithmetic with them to them
    committed = _committed = False
    stack: Stack | None = None
    _deleted = True  # until there is a value
    _donation: _Donation | None = None
    _of_keys: ClassVar[Any]

    def __new__(cls, aval: jax.ShapeDtypeStruct, *args: Any) -> Self:
        return super().__new__(cls._of_keys if is_key(aval) else cls)

    def __init__(self, aval: jax.ShapeDtypeStruct, runtime: Runtime, held: Held):
        self._aval = aval
        self.runtime = runtime
        self._held = held
        self._copying: Future[jax.Array | np.ndarray] | None = None
        self._deleted = False

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and weak type."""
        return self._aval

    @property
    def shape(self) -> tuple[int, ...]:
        return self._aval.shape

    @property
    def dtype(self) -> Any:
        return self._aval.dtype

    @property
    def weak_type(self) -> bool:
        return self._aval.weak_type

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        return self.placement.mpmd_idxs

    @property
    def submeshes(self) -> tuple[AbstractMesh, ...]:
        return self._held.submeshes

    @property
    def submesh(self) -> AbstractMesh:
        return self.submeshes[0]

    @property
    def _spec(self) -> Spec:
        return self.placement.spec or ()

    @property
    def spec(self) -> jax.sharding.PartitionSpec:
        return to_sharding(self._spec, self.submesh).spec

    @property
    def sharding(self) -> jax.sharding.Sharding:
        return jax.numpy.empty(0).sharding

    @property
    def _impl(self) -> Any:
        self._check_is_key("_impl")
        return key_impl(self.dtype)

    @property
    def _base_array(self) -> jax.Array:
        self._check_is_key("_base_array")
        return jax.random.key_data(self.value)

    def _check_is_key(self, name: str) -> None:
        """Raises ``AttributeError`` of ``name`` for other arrays than keys, as ``jax.random`` expects."""
        if not is_key(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def placement(self) -> Placement:
        """Its groups, its spec and its layer ranges, as data."""
        return self._held.placement

    @property
    def parts(self) -> tuple[MpmdArray, ...]:
        """The layer ranges of an array of stacked layers; of any other array, itself."""
        return (self,)

    @property
    def handle(self) -> Handle:
        """The groups' number for the value. Raises ``RuntimeError`` if the array was donated or deleted."""
        if self.is_deleted():
            raise RuntimeError(f"{self!r} was donated to a step or deleted")
        return self._held.handle

    def hold(self, held: Held) -> None:
        """Makes the array stand for another value and drop its own; also a deleted array."""
        if not self._deleted:
            self.runtime.free(self.mpmd_idxs, self._held.handle)
        self._held, self._deleted, self._copying = held, False, None

    def take_over(self, other: MpmdArray) -> None:
        """Makes the array stand for the value of another one, which is deleted then."""
        other._deleted = True
        self.hold(other._held)

    def is_on(self, runtime: Runtime, mpmd_idxs: tuple[int, ...]) -> bool:
        return self.runtime is runtime and set(mpmd_idxs) <= set(self.mpmd_idxs)

    def is_deleted(self) -> bool:
        if (donation := self._donation) is not None and donation.future.has_failed:
            self._donation = None
            self.hold(donation.held)
        return self._deleted

    def delete(self) -> None:
        """Drops the value on all groups."""
        if not self.is_deleted():
            self._deleted = True
            self._copying = None
            self.runtime.free(self.mpmd_idxs, self._held.handle)

    def donate_to(self, future: StepFuture) -> None:
        """Gives the value to a step. If groups go back when the step fails, the array has it again."""
        if not self.runtime.goes_back or not self.runtime.left_out.isdisjoint(self.mpmd_idxs):
            self.delete()
            return
        self._deleted, self._donation, self._copying = True, _Donation(future, self._held), None
        array, runtime = weakref.ref(self), weakref.ref(self.runtime)
        mpmd_idxs, handle = self.mpmd_idxs, self._held.handle

        def settle(has_failed: bool) -> None:
            groups, donated = runtime(), array()
            keeps = has_failed and donated is not None and donated._may_hold(handle)
            if groups is not None and not keeps:
                groups.free(mpmd_idxs, handle)

        future.call_when_done(settle)

    def _may_hold(self, handle: Handle) -> bool:
        """Whether the array stands for the value, or will again if the step that took it fails."""
        return handle in (self._held.handle, self._donation and self._donation.held.handle)

    def __del__(self) -> None:
        if not self._deleted or self._donation is not None:
            self.delete()

    @api_boundary
    def block_until_ready(self) -> MpmdArray:
        """Waits until all groups of the array have computed its value. Raises as ``handle``."""
        assert self.handle is not None
        self.runtime.check_process()
        for mpmd_idx in self.mpmd_idxs:
            self._held.future.reply(mpmd_idx)
        return self

    @property
    @api_boundary
    def copies(self) -> dict[int, Copy]:
        """The value of each group that holds the array, by group, with its sharding there.

        Fetches and waits; the copies are fetched together. Raises as reading the array does.
        """
        self.block_until_ready()
        fetching = [self.runtime.fetch(mpmd_idx, self.handle) for mpmd_idx in self.mpmd_idxs]
        values = [self._typed(fetched.result()) for fetched in fetching]
        return {
            mpmd_idx: Copy(decode(value, self._aval), self._sharding_of(value, submesh))
            for mpmd_idx, submesh, value in zip(self.mpmd_idxs, self.submeshes, values, strict=True)
        }

    @property
    @api_boundary
    def to_mpmd_local_array(self) -> jax.Array | np.ndarray | list[jax.Array | np.ndarray]:
        """The value of the array's only copy, or the list of the values of its ``copies``."""
        local = [copy.value for copy in self.copies.values()]
        return local[0] if len(local) == 1 else local

    def _sharding_of(self, value: jax.Array | np.ndarray, submesh: AbstractMesh) -> jax.sharding.Sharding:
        if isinstance(value, jax.Array):
            return value.sharding
        return to_sharding(fitting(self._spec, self.shape, submesh.shape), submesh)

    def _typed(self, array: Any) -> jax.Array | np.ndarray:
        """A fetched array, in the same buffers, over a mesh with the axis types of the caller's mesh."""
        axes = self.submesh
        if isinstance(array, np.ndarray) or not is_explicit(axes):
            return array
        mesh = Mesh(array.sharding.mesh.devices, axes.axis_names, axes.axis_types)
        return jax.device_put(array, NamedSharding(mesh, array.sharding.spec))

    def copy_to_host_async(self) -> None:
        """Starts to fetch the value for the next read. Does not wait; ``jax.device_get`` calls this."""
        if self._copying is None and self.nbytes > INLINE_BYTES:  # a smaller value comes with the reply
            self._copying = self.runtime.fetch(self.mpmd_idxs[0], self.handle)

    def raw_value(self) -> np.ndarray:
        """The value on the host; of a key array, the integers inside."""
        handle, mpmd_idx = self.handle, self.mpmd_idxs[0]
        self.runtime.check_process()
        inline = self._held.future.reply(mpmd_idx).inline
        if handle in inline:
            return inline[handle]
        copying, self._copying = self._copying, None
        return np.asarray((copying or self.runtime.fetch(mpmd_idx, self.handle)).result())

    @api_boundary
    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray:
        if is_key(self):
            raise TypeError(f"{self!r} has no numpy equivalent; see jax.random.key_data")
        return np.array(self.raw_value(), dtype=dtype, copy=copy)

    @property
    @api_boundary
    def value(self) -> jax.Array:
        """The value, an array of this process on its default device."""
        value = decode(jax.numpy.asarray(self.raw_value()), self._aval)
        return with_weak_type(value) if self.weak_type else value

    @api_boundary
    def __format__(self, format_spec: str) -> str:
        if is_key(self):
            return format(self.value, format_spec)
        return format(self.item() if not self.shape else np.asarray(self), format_spec)

    @api_boundary
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and deep-copied as the value, of ``to_host``: another process cannot reach the groups."""
        return (copy.copy if is_key(self) else np.asarray), (_leaf_to_host(self),)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a scalar array")
        return self.shape[0]

    def __repr__(self) -> str:
        state = ", deleted" if self.is_deleted() else ""
        known = self._inline_now()
        value = "" if known is None else f"{known if known.ndim == 0 else known.tolist()}, "
        return (
            f"MpmdArray({value}shape={self.shape}, dtype={self.dtype}, mpmd_idxs={self.mpmd_idxs}, "
            f"spec={self.spec}{state})"
        )

    def _inline_now(self) -> np.ndarray | None:
        """A few numbers that have come with the reply of their step, such as a loss. Does not wait."""
        if self.is_deleted() or is_key(self) or self.size > _MOST_SHOWN:
            return None
        reply = self._held.future.reply_now(self.mpmd_idxs[0])
        return None if reply is None else reply.inline.get(self._held.handle)


@api_boundary
def to_host(tree: Any) -> Any:
    """The values of a pytree on the host; its arrays are fetched together.

    Args:
      tree: a pytree; ``MpmdArray``s and jax arrays become numpy arrays of the same shape and dtype, and
        typed random number generator keys become jax arrays. Other leaves stay as they are.

    Raises: the errors of reading its arrays: ``TaskError``, ``GroupDiedError``, and ``RuntimeError`` for an
      array that was donated or deleted.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return jax.tree.map(_leaf_to_host, tree)


def _leaf_to_host(leaf: Any) -> Any:
    if not isinstance(leaf, MpmdArray):
        return jax.device_get(leaf) if isinstance(leaf, jax.Array) else leaf
    return leaf.value if is_key(leaf) else np.asarray(leaf)


def placement_on(leaf: Any, runtime: Runtime) -> Placement:
    return leaf.placement if isinstance(leaf, MpmdArray) and leaf.runtime is runtime else ANYWHERE


def values_of(arrays: Sequence[MpmdArray]) -> list[jax.Array]:
    for array in arrays:
        array.copy_to_host_async()
    return [array.value for array in arrays]


class MpmdKeyArray(MpmdArray):
    """An ``MpmdArray`` of random number generator keys, which JAX takes apart by its class."""


MpmdArray._of_keys = MpmdKeyArray
register_array_type(MpmdArray, MpmdKeyArray, values_of)
