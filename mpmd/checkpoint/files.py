"""Saves pytrees of ``MpmdArray``s, and restores them onto groups."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax import checkpoint as orbax

from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.arrays.array import MpmdArray
from mpmd.checkpoint import integrity, leaves
from mpmd.checkpoint.array_handler import registry
from mpmd.checkpoint.pytree_handler import PyTreeHandler
from mpmd.checkpoint.reservation import reserved
from mpmd.checkpoint.restoring import GroupRestoreArgs
from mpmd.compat import api_boundary
from mpmd.errors import CheckpointError, GroupDiedError
from mpmd.meshes.group_mesh import GroupMesh, mesh_fault
from mpmd.validation import path_fault, raise_faults

Path = str | os.PathLike


@api_boundary
def save(path: Path, tree: Any) -> None:
    """Saves a pytree as an Orbax checkpoint, and waits until it is complete.

    Each group writes its own values, which do not pass through this process. Orbax reads the result in any
    process: an ``MpmdArray`` is a jax array there. Until it is complete, nothing is at ``path``; then it is
    durable, with a checksum of each chunk.

    Args:
      path: a directory that does not exist, on storage that all groups share: a local path or ``gs://``.
      tree: a pytree of arrays, numbers and strings.

    Raises: ``ValueError`` when the path exists or is being saved to, and with all leaves that cannot be
      saved: leaves of other types, donated or deleted arrays, empty arrays, and arrays on two meshes;
      ``CheckpointError`` with a group and the path when a group cannot write, or when a value was lost
      because its step failed; ``GroupDiedError``.
    """
    try:
        save_async(path, tree).result()
    except (CheckpointError, GroupDiedError) as error:
        # The traceback is of several threads of Orbax, which explain nothing.
        raise error.with_traceback(None) from error.__cause__


@api_boundary
def save_async(path: Path, tree: Any) -> Future[None]:
    """``save`` without waiting: steps may run meanwhile, and may take over the values of ``tree``.

    Returns: a future that is done when the checkpoint is complete. It raises the errors of groups.

    Raises: ``ValueError`` as ``save``.
    """
    directory = epath.Path(_absolute(path))
    leaves.check_savable(tree, registry())  # as the handler does, but before there is anything on storage
    runtimes = {leaf.runtime for leaf in jax.tree.leaves(tree) if isinstance(leaf, MpmdArray)}  # one or none
    with contextlib.ExitStack() as undo:
        above = integrity.existing(directory)
        undo.enter_context(reserved(directory))
        # Before groups copy values: otherwise nobody frees the copies where storage refuses the directory.
        made_first = orbax.options.AsyncOptions(create_directories_asynchronously=False)
        checkpointer = undo.enter_context(orbax.AsyncCheckpointer(handler(), async_options=made_first))
        checkpointer.save(directory, args=orbax.args.PyTreeSave(tree))
        resources = undo.pop_all()

    def finish() -> None:
        with resources:
            checkpointer.wait_until_finished()
            integrity.sync(directory)
            integrity.sync_name(directory, above)
            PyTreeHandler().check_saved(directory)
        for runtime in runtimes:
            runtime.last_checkpoint = str(directory)

    executor = ThreadPoolExecutor(1, "mpmd save")
    finished = executor.submit(finish)
    executor.shutdown(wait=False)  # the thread ends by itself
    return finished


@api_boundary
def restore(path: Path, target: Any, mesh: GroupMesh | None = None) -> Any:
    """Restores a pytree from an Orbax checkpoint, also of plain JAX, and waits until it is read.

    Args:
      path: the checkpoint.
      target: a pytree of the same structure, with ``...`` for leaves that are not to be read. Groups read
        leaves that are an ``MpmdArray``, to the groups of this array, or an ``ArgumentLeaf`` of
        ``step.argument_leaves()``: each process the shards of its devices, straight from storage. Further
        leaves are as in Orbax: jax arrays, ``jax.ShapeDtypeStruct``s, numpy arrays, numbers.
      mesh: the groups of the step whose ``argument_leaves`` are in the target.

    Returns: the pytree, with ``MpmdArray``s where groups have read.

    Raises: ``FileNotFoundError``; ``ValueError`` that names the leaves which only one of checkpoint and
      target has, or which are of other shapes or dtypes; ``DamagedCheckpointError`` with the files or arrays
      that are damaged, and another checkpoint; ``CheckpointError`` with a group and the path
      when a group cannot read; ``GroupDiedError``.
    """
    raise_faults(path_fault("path", path), mesh_fault("mesh", mesh, optional=True))
    directory = epath.Path(_absolute(path))
    if directory.exists() and not (metadata := directory / "_METADATA").exists():
        fault = f"{metadata} is missing; a manager has the checkpoints of a step in 100/default, or 100/ITEM"
        raise integrity.damaged(directory, [fault])
    try:
        with orbax.Checkpointer(handler()) as checkpointer:
            return checkpointer.restore(directory, args=restore_args(target, mesh))
    except (CheckpointError, GroupDiedError) as error:
        raise error.with_traceback(None) from error.__cause__


def handler() -> orbax.PyTreeCheckpointHandler:
    """Orbax's handler of pytrees, for which groups save and restore ``MpmdArray``s.

    For a manager of checkpoints::

        manager = orbax.CheckpointManager(directory, item_handlers=mpmd.checkpoint.handler(), options=...)
        manager.save(number, args=orbax.args.PyTreeSave(state))
        target = mpmd.checkpoint.restore_args(step.argument_leaves(), mesh)
        state = manager.restore(manager.latest_step(), args=target)
    """
    implementation = PyTreeHandler()
    return orbax.PyTreeCheckpointHandler(
        use_zarr3=True, type_handler_registry=implementation.types, handler_impl=implementation
    )


def restore_args(target: Any, mesh: GroupMesh | None = None) -> orbax.args.PyTreeRestore:
    """Orbax's arguments for restoring ``target``; the parameters are as in ``restore``."""
    raise_faults(mesh_fault("mesh", mesh, optional=True))
    return orbax.args.PyTreeRestore(
        item=jax.tree.map(
            lambda leaf: leaf.aval if isinstance(leaf, ArgumentLeaf | MpmdArray) else leaf, target
        ),
        restore_args=jax.tree.map(lambda leaf: _restore_args(leaf, mesh), target),
    )


def _restore_args(leaf: Any, mesh: GroupMesh | None) -> orbax.RestoreArgs:
    if isinstance(leaf, MpmdArray):
        return GroupRestoreArgs.of_array(leaf)
    if isinstance(leaf, ArgumentLeaf):
        if mesh is None:
            raise ValueError(f"the target has {leaf.path} of a step: give the mesh of the step, too")
        return GroupRestoreArgs.of_leaf(leaf, mesh.whole)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
    if isinstance(leaf, np.generic | complex):
        return orbax.RestoreArgs(restore_type=type(leaf))
    return orbax.checkpoint_utils.construct_restore_args(leaf)


def _absolute(path: Path) -> str:
    raise_faults(path_fault("path", path))
    text = os.fspath(path)
    scheme, remote, _ = text.partition("://")
    if remote and scheme != "gs":
        raise ValueError(f"{text}: Orbax stores checkpoints at local paths and gs://")
    return text if remote else os.path.abspath(text)
