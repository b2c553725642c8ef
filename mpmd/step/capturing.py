"""Captures of tasks: the one that a caller names, and the one with which a step fails."""

from __future__ import annotations

import difflib
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from mpmd.ir.plan import Plan
from mpmd.runtime.captures import TaskWriter, directory_fault
from mpmd.runtime.fetch_kept import drop_kept, fetch_kept
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Capture, Captured, StepReply, captured_of
from mpmd.runtime.step_future import StepFuture
from mpmd.util.tables import first_few
from mpmd.util.warn import warn_user
from mpmd.validation import int_fault, path_fault, raise_faults, str_fault


def check_capture(plan: Plan, task: str, to: str | os.PathLike[str], mpmd_idx: int | None) -> int:
    """The group that runs the task that ``capture`` names. Raises for arguments that are not valid."""
    raise_faults(
        str_fault("task", task),
        path_fault("to", to),
        int_fault("mpmd_idx", mpmd_idx, 0, optional=True),
        title="step.capture: ",
    )
    raise_faults(directory_fault(Path(to)), title="step.capture: ")
    return _group_of(plan, task, mpmd_idx)


def _group_of(plan: Plan, task: str, mpmd_idx: int | None) -> int:
    """The group that runs a task.

    Args:
      plan: that of the whole mesh.
      mpmd_idx: the group, if the caller has named it.

    Raises: ``ValueError`` when no group, or not this one, runs such a task.
    """
    tasks = {program.mpmd_idx: [run.label for run in program.runs] for program in plan.programs}
    texts = {run.label: plan.task_text(run.task) for program in plan.programs for run in program.runs}
    groups = [group for group, names in tasks.items() if task in names]
    if mpmd_idx is None and groups:
        return groups[0]
    if mpmd_idx in groups:
        return mpmd_idx
    if groups:
        raise ValueError(f"mpmd_idx: group {mpmd_idx} does not run {texts[task]}, which groups {groups} run")
    similar = [texts[name] for name in difflib.get_close_matches(task, texts, n=5) or texts]
    raise ValueError(f"task: the step has no task {task!r}; tasks are {first_few(similar, 5)}")


def write_kept(
    runtime: Runtime,
    writer: TaskWriter,
    captured: Captured,
    error: BaseException | None,
    to: Callable[[], Path],
) -> Path:
    """Brings a task that a group has kept, and writes it.

    Args:
      writer: writes tasks of the step.
      error: with which it failed, if it did.
      to: gives the directory, once the values are here.

    Returns: the directory.
    Raises: as ``fetch_kept`` and ``TaskWriter.write``.
    """
    kept = fetch_kept(runtime, captured, error)
    directory = to()
    writer.write(kept, directory)
    return directory


def write_named(
    runtime: Runtime, writer: TaskWriter, mpmd_idx: int, future: StepFuture, to: str | os.PathLike[str]
) -> None:
    """Writes the task that a group was asked to keep, once the group has ended the step.

    Raises: the error of the step on that group; a task that cannot be written is a ``RuntimeWarning``.
    """
    captured, error = future.captured(mpmd_idx)
    if captured is not None:
        try:
            write_kept(runtime, writer, captured, error, lambda: Path(to))
        except (OSError, RuntimeError) as fault:  # the caller has to get the state
            text = f"step.capture: {captured.text} could not be written to {os.fspath(to)}: {fault}"
            warn_user(text, RuntimeWarning)
    if error is not None:
        future.reply(mpmd_idx)


def failures_captured(runtime: Runtime, groups: Sequence[int]) -> dict[int, Capture]:
    """For each group, the request to keep the task with which it fails, where the mesh writes such tasks."""
    if runtime.captures.directory is None:
        return {}
    return {group: Capture(None, runtime.next_handle()) for group in groups}


def failure_capture(
    runtime: Runtime, writer: TaskWriter, replies: Mapping[int, Future[StepReply]]
) -> Future[None] | None:
    """Writes the task with which a step fails, where the mesh writes such tasks, in a thread of its own.

    Returns: a future that is done when the step has not failed, or the task was written.
    """
    if runtime.captures.directory is None:
        return None
    return FailureCapture(runtime, writer, replies).ended


class FailureCapture:
    """Writes the task with which a step fails, in a thread of its own.

    Args:
      writer: writes tasks of the step, which its caller may drop.
      replies: those of the step's groups.

    Attributes:
      ended: is done when the step has not failed, or the task was written.
    """

    def __init__(self, runtime: Runtime, writer: TaskWriter, replies: Mapping[int, Future[StepReply]]):
        self.ended: Future[None] = Future()
        # Replies keep this object. They live as long as the step's arrays, which must not keep the step.
        self._needed: tuple[Runtime, TaskWriter] | None = (runtime, writer)
        self._lock = threading.Lock()
        self._left = len(replies)
        self._errors: list[BaseException] = []  # of tasks: each of several groups may have one
        self._written: str | None = None
        for reply in replies.values():
            reply.add_done_callback(self._add)

    def _add(self, reply: Future[StepReply]) -> None:
        error, captured = reply.exception(), captured_of(reply)
        with self._lock:
            self._left -= 1
            if captured is not None and error is not None and self._needed is not None:
                runtime, writer = self._needed
                self._errors.append(error)
                if len(self._errors) == 1:
                    arguments = (runtime, writer, captured, error)
                    threading.Thread(target=self._write, args=arguments, name="mpmd capture").start()
                else:
                    drop_kept(runtime, captured)
        self._end_if_over()

    def _write(self, runtime: Runtime, writer: TaskWriter, captured: Captured, error: BaseException) -> None:
        written = ""
        try:
            directory = runtime.captures.claim()
            if directory is None:
                drop_kept(runtime, captured)
            else:
                to = partial(_new_directory, directory, captured.task)
                path = write_kept(runtime, writer, captured, error, to)
                task = f"{captured.text} of group {captured.mpmd_idx}"
                written = f"mpmd: {task} is in {path}; `mpmd replay {path}` runs it again"
        except Exception as fault:  # the step's own error is what its caller has to see
            written = f"mpmd: the task could not be captured: {type(fault).__name__}: {fault}"
        with self._lock:
            self._written = written
        self._end_if_over()

    def _end_if_over(self) -> None:
        with self._lock:
            if self._left or (self._errors and self._written is None):
                return
            errors, self._errors = self._errors, []
            written, self._written = self._written, None
            self._left, self._needed = -1, None
        if written:
            for error in errors:
                error.add_note(written)
        self.ended.set_result(None)


def _new_directory(directory: Path, task: str) -> Path:
    """A new directory for a task, which only its user may enter."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{task}-", dir=directory))
