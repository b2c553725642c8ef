"""Checkpoints that Orbax reads, written and read by the groups themselves.

Start reading in ``files.py``, which has the functions for users. Orbax calls ``pytree_handler.py``, which
compares leaves (``leaves.py``) and files (``integrity.py``), and ``array_handler.py``, which calls
``saving.py`` and ``restoring.py``. ``orbax_internals.py`` has all uses of Orbax without a public name. The
groups' side is ``mpmd/runtime/storage.py``.
"""

try:
    import orbax.checkpoint
except ModuleNotFoundError as error:
    raise ImportError("checkpoints need Orbax: pip install 'mpmd[checkpoint]'") from error
else:
    del orbax

from mpmd.checkpoint.files import handler, restore, restore_args, save, save_async

__all__ = ["handler", "restore", "restore_args", "save", "save_async"]
