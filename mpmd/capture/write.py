"""Makes the files of a captured task. Nobody but their user may read them."""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AbstractMesh

from mpmd.capture.blocks import equations_of
from mpmd.capture.exports import Exports
from mpmd.compat import key_impl_name, trace_context_for_threads
from mpmd.compiler.jaxprs.equations import avals_of
from mpmd.compiler.lower.task_function import on_group
from mpmd.ir.plan import Run
from mpmd.keys import is_key
from mpmd.program import Program
from mpmd.replay.record import (
    EQUATIONS,
    EQUATIONS_JSON,
    FORMAT,
    INPUTS,
    RESULTS,
    TASK,
    Equations,
    TaskRecord,
    ValueRecord,
    dump_equations,
    dump_task,
)
from mpmd.replay.report import versions_here
from mpmd.replay.values import as_bytes, count_nonfinite, digest_of
from mpmd.runtime.captures import KeptTask
from mpmd.runtime.nonfinite import passed_on
from mpmd.version import __version__

BUDGET = 2**20
"""The most bytes of a directory besides the task's inputs."""

_MARGIN = 2**16
"""Of these, the bytes that are left for the record, and the headers of files."""


class CaptureWriter:
    """Writes tasks of one step, in any thread. Implements ``mpmd.runtime.captures.TaskWriter``.

    It is made under the settings of JAX under which the step was compiled.

    Args:
      program: that of the step, with the numbers of the whole mesh.
      submeshes: those of all groups.
    """

    def __init__(self, program: Program, submeshes: Sequence[AbstractMesh]):
        self._plan = program.plan
        self._jaxprs = program.jaxprs
        self._submeshes = tuple(submeshes)
        self._context = trace_context_for_threads()

    def write(self, kept: KeptTask, to: Path) -> None:
        """Writes a task to a directory, which does not exist or is empty. It is there whole, or not at all.

        Raises: ``OSError`` when it cannot be written, or is not empty.
        """
        captured = kept.captured
        run = next(run for run in self._plan.programs[captured.mpmd_idx].runs if run.label == captured.task)
        to.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
        try:
            with self._context(), jax.debug_nans(False), jax.debug_infs(False):
                self._write(kept, run, directory)
            os.rename(directory, to)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _write(self, kept: KeptTask, run: Run, directory: Path) -> None:
        captured = kept.captured
        executable = self._plan.executable(run.executable)
        submesh = self._submeshes[captured.mpmd_idx]
        jaxpr = on_group(self._jaxprs[captured.mpmd_idx, run.task], self._submeshes, captured.mpmd_idx)
        exports = Exports(submesh, captured.platform)
        sources, block = equations_of(jaxpr, exports)
        whole = exports.of_all(jaxpr, executable)
        equations = Equations(
            sources=sources,
            block=block,
            exports=tuple(record for record, _ in exports.done),
            executable=whole if isinstance(whole, int) else None,
        )
        files = {EQUATIONS_JSON: dump_equations(equations).encode()}
        files |= {f"{number}.mlir": code for number, (_, code) in enumerate(exports.done)}
        _write_zip(directory / EQUATIONS, files)
        _write_values(directory / INPUTS, "input", dict(enumerate(kept.inputs)))
        left = BUDGET - _MARGIN - os.path.getsize(directory / EQUATIONS)
        stored = _smallest(kept.results, left)
        _write_values(directory / RESULTS, "result", {i: kept.results[i] for i in stored})
        texts = passed_on(self._plan, self._plan.programs[captured.mpmd_idx])
        results = kept.results or (None,) * len(run.outputs)
        record = TaskRecord(
            format=FORMAT,
            task=captured.task,
            text=captured.text,
            group=captured.mpmd_idx,
            error=kept.error,
            inputs=tuple(
                _recorded(name, array, aval, array is not None, False)
                for name, array, aval in zip(run.inputs, kept.inputs, avals_of(jaxpr.invars), strict=True)
            ),
            results=tuple(
                _recorded(name, array, aval, i in stored, name in texts)
                for i, (name, array, aval) in enumerate(
                    zip(run.outputs, results, avals_of(jaxpr.outvars), strict=True)
                )
            ),
            submesh=tuple(submesh.shape.items()),
            executable=str(executable),
            without_executable=whole if isinstance(whole, str) else "",
            platform=captured.platform,
            device=captured.device_kind,
            environment=dict(captured.environment),
            versions={**versions_here(), "mpmd": __version__},
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        with _opened(directory / TASK) as file:
            file.write(dump_task(record).encode())


def _recorded(name: str, array: np.ndarray | None, aval, is_stored: bool, is_passed_on: bool) -> ValueRecord:
    num_nans, num_infs = (0, 0) if array is None else count_nonfinite(array)
    return ValueRecord(
        name=name,
        dtype="" if array is None else str(array.dtype),
        shape=() if array is None else array.shape,
        key_impl=key_impl_name(aval.dtype) if is_key(aval) else None,
        digest=None if array is None else digest_of(array),
        is_stored=is_stored,
        is_passed_on=is_passed_on,
        num_nans=num_nans,
        num_infs=num_infs,
    )


def _smallest(arrays: Sequence[np.ndarray], most_bytes: int) -> frozenset[int]:
    """The positions of the smallest arrays, as many as fit; each has a header of less than 512 bytes."""
    chosen = set()
    for i, array in sorted(enumerate(arrays), key=lambda member: member[1].nbytes):
        most_bytes -= array.nbytes + 512
        if most_bytes < 0:
            break
        chosen.add(i)
    return frozenset(chosen)


def _write_values(path: Path, kind: str, arrays: Mapping[int, np.ndarray | None]) -> None:
    """Writes the bytes of arrays as ``numpy.savez`` does; numpy alone does not know all dtypes."""
    with _opened(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for i, array in arrays.items():
            if array is not None:
                with archive.open(f"{kind}{i}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, as_bytes(array), allow_pickle=False)


def _write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    with _opened(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def _opened(path: Path):
    """A new file that only its user may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
