"""Reads a captured task from its directory, runs it, and compares its results with the recorded ones."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpmd.replay.exported import run_exported
from mpmd.replay.record import INPUTS, RESULTS, TaskRecord, read_task
from mpmd.replay.values import as_bytes, last_digits, read_values
from mpmd.util.printable import printable
from mpmd.util.tables import first_few
from mpmd.validation import path_fault, raise_faults


def load(directory: str | os.PathLike[str]) -> CapturedTask:
    """Reads the directory of a captured task.

    Args:
      directory: a directory that ``step.capture(..., to=...)`` or ``capture=`` of a mesh has written.

    Raises: ``ValueError`` when it is of another format, or damaged; ``OSError`` when it cannot be read.
    """
    raise_faults(path_fault("directory", directory))
    path = Path(directory)
    record = read_task(path)
    inputs, results = read_values(path / INPUTS, record.inputs), read_values(path / RESULTS, record.results)
    return CapturedTask(path, record, inputs, results)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A result with other bits than recorded.

    Attributes:
      name: its name in the plan.
      last_digits: the most representable numbers between two elements.
    """

    name: str
    last_digits: int


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class CapturedTask:
    """A task of a step with its inputs, as ``mpmd.replay.load`` returns it.

    Attributes:
      directory: where it is.
      record: the task, its equations one by one (``record.evaluation``), its process and its versions.
      inputs: the operands by their names in the plan; ``None`` for one that was lost. Typed keys are the
        integers inside.
      results: the recorded results by their names; ``None`` if the task had failed before it had any.
    """

    directory: Path
    record: TaskRecord
    inputs: Mapping[str, np.ndarray | None]
    results: Mapping[str, np.ndarray | None]

    def __repr__(self) -> str:
        failed = f", which had failed: {self.record.error}" if self.record.error else ""
        return printable(
            f"{self.record.text} of group {self.record.group} with {len(self.inputs)} inputs and "
            f"{len(self.results)} results{failed}"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("equations", "evaluate", "digests"):
            raise AttributeError(
                f"a captured task has no {name}: the driver evaluates equations when it captures a task, "
                "and record.evaluation has what it has found"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def not_runnable(self) -> str:
        """The reason why the executable cannot run; empty if it can."""
        if self.record.not_exported:
            return f"it cannot be exported: {self.record.not_exported}"
        if lost := [name for name, array in self.inputs.items() if array is None]:
            return (
                f"{first_few(lost)}: lost, because the task had taken them over when it failed. With "
                "jax.debug_nans or jax.debug_infs, and with step.capture, such inputs are copied before"
            )
        return ""

    def run(self) -> dict[str, np.ndarray]:
        """Runs the executable. Returns the results by their names in the plan.

        Raises: ``ValueError`` when an input was lost, when there is no executable, with the reason, or when
          JAX has fewer devices here than the group, with the variable that changes that.
        """
        if self.not_runnable:
            raise ValueError(self.not_runnable)
        operands = [array for array in self.inputs.values() if array is not None]
        results = run_exported(self.directory, self.record, operands)
        return dict(zip(self.results, results, strict=True))

    def differences(self, results: Mapping[str, np.ndarray]) -> list[Difference]:
        """The results of ``run`` whose bits are not the recorded ones."""
        return [
            Difference(name, last_digits(results[name], recorded))
            for name, recorded in self.results.items()
            if recorded is not None and not np.array_equal(as_bytes(results[name]), as_bytes(recorded))
        ]
