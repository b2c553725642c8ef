"""Saves pytrees of ``MpmdArray``s, and restores them onto groups."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from orbax import checkpoint as orbax

from mpmd.arguments.leaves import ArgumentLeaf
from mpmd.array import MpmdArray
from mpmd.checkpoint.array_handler import registry
from mpmd.checkpoint.restoring import GroupRestoreArgs
from mpmd.errors import CheckpointError, GroupDiedError
from mpmd.mesh import GroupMesh, mesh_fault
from mpmd.runtime.protocol import Runtime
from mpmd.validation import path_fault, raise_faults

Path = str | os.PathLike


def save(path: Path, tree: Any) -> None:
    """Saves a pytree as an Orbax checkpoint, and waits until it is complete.

    Each group writes its own values, which do not pass through this process. Orbax reads the result in any
    process: an ``MpmdArray`` is a jax array there. Until it is complete, nothing is at ``path``.

    Args:
      path: a directory that does not exist, on storage that all groups share: a local path or ``gs://``.
      tree: a pytree of arrays, numbers and strings.

    Raises: ``ValueError`` when the path exists, and for arrays that were donated or deleted, are empty or are
      on several meshes; ``CheckpointError`` with a group and the path when a group cannot write, or when a
      value was lost because its step failed; ``GroupDiedError``.
    """
    new = _new(path)
    try:
        with orbax.Checkpointer(handler()) as checkpointer:
            checkpointer.save(new, args=orbax.args.PyTreeSave(tree))
        _note_complete(path, _runtimes(tree))
    except (CheckpointError, GroupDiedError) as error:
        # The traceback is of several threads of Orbax, which explain nothing.
        raise error.with_traceback(None) from error.__cause__


def save_async(path: Path, tree: Any) -> Future[None]:
    """``save`` without waiting: steps may run, and may be given the values of ``tree`` to donate.

    Returns: a future that is done when the checkpoint is complete, and raises what ``save`` raises of groups.

    Raises: ``ValueError`` as ``save``.
    """
    new = _new(path)
    checkpointer, runtimes = orbax.AsyncCheckpointer(handler()), _runtimes(tree)
    try:
        checkpointer.save(new, args=orbax.args.PyTreeSave(tree))
    except BaseException:
        checkpointer.close()
        raise

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
            _note_complete(path, runtimes)
        finally:
            checkpointer.close()

    executor = ThreadPoolExecutor(1, "mpmd save")
    finished = executor.submit(finish)
    executor.shutdown(wait=False)  # the thread ends by itself
    return finished


def restore(path: Path, target: Any, mesh: GroupMesh | None = None) -> Any:
    """Restores a pytree from an Orbax checkpoint, also one of plain JAX, and waits until it is there.

    Args:
      path: the checkpoint.
      target: a pytree of the same structure. Groups read what is an ``MpmdArray`` in it, to where that is,
        and what ``step.argument_leaves()`` has there: each process what its devices hold, straight from
        storage. Elsewhere it has what Orbax takes: jax arrays, ``jax.ShapeDtypeStruct``s, numpy arrays,
        numbers.
      mesh: the groups of the step whose ``argument_leaves`` are in the target.

    Returns: the pytree, with ``MpmdArray``s where groups have read.

    Raises: ``FileNotFoundError``; ``ValueError`` that names the leaves which are not there, or are of other
      shapes or dtypes; ``CheckpointError`` with a group and the path when a group cannot read;
      ``GroupDiedError``.
    """
    raise_faults(path_fault("path", path), mesh_fault("mesh", mesh, optional=True))
    try:
        with orbax.Checkpointer(handler()) as checkpointer:
            return checkpointer.restore(_absolute(path), args=restore_args(target, mesh))
    except (CheckpointError, GroupDiedError) as error:
        raise error.with_traceback(None) from error.__cause__


def handler() -> orbax.PyTreeCheckpointHandler:
    """Orbax's handler of pytrees, which has groups save and restore ``MpmdArray``s.

    For those who have a manager of checkpoints::

        manager = orbax.CheckpointManager(directory, item_handlers=mpmd.checkpoint.handler(), options=...)
        manager.save(number, args=orbax.args.PyTreeSave(state))
        target = mpmd.checkpoint.restore_args(step.argument_leaves(), mesh)
        state = manager.restore(manager.latest_step(), args=target)
    """
    return orbax.PyTreeCheckpointHandler(type_handler_registry=registry())


def restore_args(target: Any, mesh: GroupMesh | None = None) -> orbax.args.PyTreeRestore:
    """How Orbax is to restore ``target``; the arguments are those of ``restore``."""
    raise_faults(mesh_fault("mesh", mesh, optional=True))
    return orbax.args.PyTreeRestore(
        item=jax.tree.map(_described, target),
        restore_args=jax.tree.map(lambda leaf: _restore_args(leaf, mesh), target),
    )


def _described(leaf: Any) -> Any:
    return leaf.aval if isinstance(leaf, ArgumentLeaf | MpmdArray) else leaf


def _restore_args(leaf: Any, mesh: GroupMesh | None) -> orbax.RestoreArgs:
    if isinstance(leaf, MpmdArray):
        return GroupRestoreArgs.of_array(leaf)
    if isinstance(leaf, ArgumentLeaf):
        if mesh is None:
            raise ValueError(f"the target has {leaf.path} of a step: give the mesh of the step, too")
        return GroupRestoreArgs.of_leaf(leaf, mesh)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
    return orbax.checkpoint_utils.construct_restore_args(leaf)


def _runtimes(tree: Any) -> list[Runtime]:
    """Those whose groups have arrays of the tree; it is one, or none."""
    return list({leaf.runtime for leaf in jax.tree.leaves(tree) if isinstance(leaf, MpmdArray)})


def _note_complete(path: Path, runtimes: Iterable[Runtime]) -> None:
    for runtime in runtimes:
        runtime.last_checkpoint = _absolute(path)


def _new(path: Path) -> str:
    """The absolute path. Raises ``ValueError`` when something is there; Orbax does for remote storage."""
    absolute = _absolute(path)
    if os.path.exists(absolute):
        raise ValueError(
            f"{absolute} exists already: save to another path, or delete it; Orbax's CheckpointManager "
            "numbers checkpoints and keeps the last ones"
        )
    return absolute


def _absolute(path: Path) -> str:
    raise_faults(path_fault("path", path))
    text = os.fspath(path)
    scheme, remote, _ = text.partition("://")
    if remote and scheme != "gs":
        raise ValueError(f"{text}: Orbax stores checkpoints at local paths and gs://")
    return text if remote else os.path.abspath(text)
