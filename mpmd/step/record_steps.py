"""Recorded runs of a loaded step: several in a row, each with the state that the one before returned."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpmd.arguments.call import Call
from mpmd.ir.process_times import RecordedStep
from mpmd.runtime.recording import host_here
from mpmd.runtime.step_future import StepFuture
from mpmd.util.tables import first_few


def check_repeatable(call: Call, fed_back: Mapping[int, int]) -> None:
    """Raises ``ValueError`` for donated arguments that no result replaces."""
    gone = [path for i, path in enumerate(call.paths) if call.donated[i] and i not in fed_back]
    if gone:
        raise ValueError(
            f"step.profile: {first_few(gone)} would be gone after the first step: donated, and no result "
            "takes its place. Profile one step, or do not donate it"
        )


def record_steps(
    submit: Callable[[Call], tuple[Any, StepFuture]], call: Call, fed_back: Mapping[int, int], count: int
) -> tuple[Any, tuple[RecordedStep, ...]]:
    """Runs steps in a row, and waits for each.

    Args:
      submit: submits a step that is recorded.
      call: that of the first step.
      fed_back: the position of the result leaf that takes an argument leaf's place, by the latter's.
      count: the number of steps.

    Returns: the last result, and the record of each step.
    """
    result, step = _recorded(submit, call)
    steps = [step]
    for _ in range(count - 1):
        call = _next_call(call, jax.tree.leaves(result), fed_back)
        result, step = _recorded(submit, call)
        steps.append(step)
    return result, tuple(steps)


def _recorded(submit: Callable[[Call], tuple[Any, StepFuture]], call: Call) -> tuple[Any, RecordedStep]:
    called = time.perf_counter_ns()
    result, future = submit(call)
    replies = future.replies()
    returned = time.perf_counter_ns()
    processes = tuple(times for reply in replies for times in reply.times)
    return result, RecordedStep(host_here(), called, returned, processes)


def _next_call(call: Call, results: Sequence[Any], fed_back: Mapping[int, int]) -> Call:
    leaves = (results[fed_back[i]] if i in fed_back else leaf for i, leaf in enumerate(call.leaves))
    return dataclasses.replace(call, leaves=tuple(leaves))
