"""Writes the files of a captured task, which nobody but their user may read.

The driver calls a ``CaptureWriter`` with a task that a group has kept; ``mpmd.replay.record`` has the format.
"""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh

from mpmd.capture.walk import walk
from mpmd.compat import key_impl_name, trace_context_for_threads
from mpmd.compiler.jaxprs.equations import Atom, avals_of
from mpmd.compiler.lower.executables import python_calls, task_function
from mpmd.compiler.lower.group_meshes import GroupMeshes
from mpmd.ir.plan import Executable, Name, Spec
from mpmd.keys import is_key, raw
from mpmd.program import Program, exported
from mpmd.replay.record import FORMAT, INPUTS, MODULE, RESULTS, TASK, TaskRecord, ValueRecord, dump_task
from mpmd.replay.report import versions_here
from mpmd.replay.values import count_nonfinite
from mpmd.runtime.captures import KeptTask
from mpmd.runtime.nonfinite import passed_on
from mpmd.version import __version__


class CaptureWriter:
    """Writes tasks of one step, in any thread. Implements ``mpmd.runtime.captures.TaskWriter``.

    It is made under the settings of JAX under which the step was compiled.

    Args:
      program: the step's program, with the numbers of the whole mesh.
    """

    def __init__(self, program: Program, submeshes: Sequence[AbstractMesh]):
        self._plan = program.plan
        self._jaxprs = program.jaxprs
        self._meshes = GroupMeshes(submeshes)
        self._context = trace_context_for_threads()

    def write(self, kept: KeptTask, to: Path) -> None:
        """Writes a task to a directory, which does not exist or is empty, and appears when it is complete.

        Raises: ``OSError`` when it cannot be written, or is not empty.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
        try:
            with self._context(), jax.debug_nans(False), jax.debug_infs(False):
                self._write(kept, directory)
            os.rename(directory, to)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _write(self, kept: KeptTask, directory: Path) -> None:
        captured = kept.captured
        program, submesh = self._plan.programs[captured.mpmd_idx], self._meshes.submeshes[captured.mpmd_idx]
        run = next(run for run in program.runs if run.label == captured.task)
        executable = self._plan.executable(run.executable)
        jaxpr = self._meshes.on_group(self._jaxprs[captured.mpmd_idx, run.task], captured.mpmd_idx)
        evaluation = None
        if kept.error is not None or any(any(count_nonfinite(array)) for array in kept.results):
            sent = passed_on(self._plan, program)
            evaluation = walk(jaxpr, kept.inputs, submesh, [name in sent for name in run.outputs])
        module, not_exported = _module(jaxpr, executable, submesh, captured.platform)
        if module:
            _write_file(directory / MODULE, module)
        results = kept.results or (None,) * len(run.outputs)
        _write_values(directory / INPUTS, zip(run.inputs, kept.inputs, strict=True))
        _write_values(directory / RESULTS, zip(run.outputs, results, strict=True))
        record = TaskRecord(
            format=FORMAT,
            task=captured.task,
            text=captured.text,
            group=captured.mpmd_idx,
            error=kept.error,
            inputs=_recorded(run.inputs, jaxpr.invars, executable.in_specs, kept.inputs),
            results=_recorded(run.outputs, jaxpr.outvars, executable.out_specs, results),
            evaluation=evaluation,
            submesh=tuple(submesh.shape.items()),
            not_exported=not_exported,
            platform=captured.platform,
            device=captured.device_kind,
            environment=dict(captured.environment),
            versions={**versions_here(), "mpmd": __version__},
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        _write_file(directory / TASK, dump_task(record).encode())


def _module(jaxpr: Jaxpr, executable: Executable, submesh: AbstractMesh, platform: str) -> tuple[bytes, str]:
    if calls := ", ".join(python_calls(jaxpr.eqns)):
        return b"", f"it calls Python: {calls}"
    try:
        function = task_function(jaxpr, executable.name)
        return exported(function, executable, submesh, platform).mlir_module_serialized, ""
    except Exception as error:  # whatever it is, the operands and the evaluation are written
        return b"", f"{type(error).__name__}: {error}".splitlines()[0]


def _recorded(
    names: Sequence[Name],
    atoms: Sequence[Atom],
    specs: Sequence[Spec | None],
    arrays: Sequence[np.ndarray | None],
) -> tuple[ValueRecord, ...]:
    avals = avals_of(atoms)
    return tuple(
        ValueRecord(
            name=name,
            dtype=str(raw(aval).dtype),
            shape=tuple(raw(aval).shape),
            spec=spec,
            key_impl=key_impl_name(aval.dtype) if is_key(aval) else None,
            is_stored=array is not None,
        )
        for name, aval, spec, array in zip(names, avals, specs, arrays, strict=True)
    )


def _write_values(path: Path, arrays: Iterable[tuple[str, np.ndarray | None]]) -> None:
    """Writes arrays to an ``.npz`` file. ``numpy.savez`` refuses some names, which it has for itself."""
    with _opened(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            if array is not None:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


def _write_file(path: Path, content: bytes) -> None:
    with _opened(path) as file:
        file.write(content)


def _opened(path: Path):
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
