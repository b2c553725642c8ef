"""Captures a task that a caller names, or the task with which a step fails."""

from __future__ import annotations

import difflib
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from mpmd.ir.plan import Plan
from mpmd.runtime.captures import TaskWriter, directory_fault
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Capture, Captured, StepReply, reply_of
from mpmd.runtime.step_future import StepFuture, call_when_done
from mpmd.util.tables import first_few
from mpmd.util.warn import warn_user
from mpmd.validation import int_fault, path_fault, raise_faults, str_fault


def check_capture(plan: Plan, task: str, to: str | os.PathLike[str], mpmd_idx: int | None) -> int:
    raise_faults(
        str_fault("task", task),
        path_fault("to", to),
        int_fault("mpmd_idx", mpmd_idx, 0, optional=True),
        title="step.capture: ",
    )
    raise_faults(directory_fault(Path(to)), title="step.capture: ")
    runs = [(run, program.mpmd_idx) for program in plan.programs for run in program.runs]
    groups = [group for run, group in runs if run.label == task]
    texts = {run.label: plan.task_text(run.task) for run, _ in runs}
    if not groups:
        similar = [texts[name] for name in difflib.get_close_matches(task, texts, n=5) or texts]
        raise ValueError(f"task: the step has no task {task!r}; tasks are {first_few(similar, 5)}")
    if mpmd_idx not in (None, *groups):
        raise ValueError(f"mpmd_idx: group {mpmd_idx} does not run {texts[task]}, which groups {groups} run")
    return groups[0] if mpmd_idx is None else mpmd_idx


def write_named(
    runtime: Runtime, writer: TaskWriter, mpmd_idx: int, future: StepFuture, to: str | os.PathLike[str]
) -> None:
    """Writes the task that a group was asked to keep, once the group has ended the step.

    Raises: the error of the step on that group; a task that cannot be written is a ``RuntimeWarning``.
    """
    captured, error = future.captured(mpmd_idx)
    if captured is not None:
        try:
            writer.write(runtime.fetch_kept(captured, error), Path(to))
        except Exception as fault:  # whatever it is, the caller has to get the state
            reason = f"{type(fault).__name__}: {fault}"
            text = f"step.capture: {captured.text} could not be written to {os.fspath(to)}: {reason}"
            warn_user(text, RuntimeWarning)
    if error is not None:
        future.reply(mpmd_idx)


def failures_captured(runtime: Runtime, groups: Sequence[int]) -> dict[int, Capture]:
    if runtime.captures.directory is None:
        return {}
    return {group: Capture(None, runtime.next_handle()) for group in groups}


def failure_capture(
    runtime: Runtime, writer: TaskWriter, replies: Mapping[int, Future[StepReply]]
) -> Future[None] | None:
    """Writes the task with which a step fails, where the mesh writes such tasks, in a thread of its own.

    Args:
      writer: writes tasks of the step, which its caller may drop.
      replies: the replies of the step's groups.

    Returns: a future that is done when the step has not failed, or the task was written.
    """
    if runtime.captures.directory is None:
        return None
    ended: Future[None] = Future()
    # Popped: the replies keep ``on_done`` as long as the step's arrays live, which must not keep the step.
    needed = [(writer, runtime, replies, ended)]

    def on_done(has_failed: bool) -> None:
        arguments = needed.pop()
        if not has_failed:
            ended.set_result(None)
            return
        # Not a daemon, as the thread of a group is that may call this: Python aborts if it is in JAX at exit.
        thread = threading.Thread(target=_write_failure, args=arguments, name="mpmd capture", daemon=False)
        try:
            thread.start()
        except Exception as fault:  # no threads are left: whoever waits for the error has to get it
            _write_failure(*arguments, fault)

    call_when_done(replies.values(), on_done)
    return ended


def _write_failure(
    writer: TaskWriter,
    runtime: Runtime,
    replies: Mapping[int, Future[StepReply]],
    ended: Future[None],
    obstacle: Exception | None = None,
) -> None:
    """Writes the first task that has failed, unless there is an ``obstacle``; groups drop the tasks."""
    failed = [
        (error, captured)
        for reply in replies.values()
        if (error := reply.exception()) is not None and (captured := reply_of(reply).captured) is not None
    ]
    try:
        directory = runtime.captures.claim() if failed and obstacle is None else None
        for _, captured in failed[0 if directory is None else 1 :]:
            runtime.drop_kept(captured)
        if obstacle is not None:
            raise obstacle
        if directory is not None:
            error, captured = failed[0]
            kept = runtime.fetch_kept(captured, error)
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(prefix=f"{captured.task}-", dir=directory))
            writer.write(kept, path)
            task = f"{captured.text} of group {captured.mpmd_idx}"
            _add_notes(failed, f"mpmd: {task} is in {path}; `mpmd replay {path}` runs it again")
    except Exception as fault:  # the step's own error is what its caller has to see
        _add_notes(failed, f"mpmd: the task could not be captured: {type(fault).__name__}: {fault}")
    finally:
        ended.set_result(None)


def _add_notes(failed: Sequence[tuple[BaseException, Captured]], text: str) -> None:
    for error, _ in failed:
        error.add_note(text)
