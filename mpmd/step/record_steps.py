"""Records runs of a loaded step: several in a row, each with the state that the run before returned."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpmd.arguments.call import Call
from mpmd.ir.process_times import RecordedStep
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.recording import host_here
from mpmd.runtime.step_future import StepFuture
from mpmd.step.step_results import hand_back
from mpmd.util.tables import first_few


def check_repeatable(call: Call, fed_back: Mapping[int, int]) -> None:
    gone = [path for i, path in enumerate(call.paths) if call.donated[i] and i not in fed_back]
    if gone:
        raise ValueError(
            f"step.profile: {first_few(gone)} would be gone after the first step: donated, and no result "
            "takes its place. Profile one step, or do not donate it"
        )


def check_names(method: str, names: Sequence[str], args: Sequence[Any], **options: bool) -> None:
    """Raises ``ValueError`` for options of a method of steps that may be meant for the step.

    Args:
      method: ``profile`` or ``capture``.
      names: the names of the step's positional parameters.
      args: the step's arguments that were passed by position.
      options: whether each was passed.
    """
    for name, is_passed in options.items():
        if is_passed and name in names and names.index(name) >= len(args):
            raise ValueError(
                f"step.{method}: {name} is an option of {method} and an argument of the step; pass the "
                "step's by position"
            )


def record_steps(
    runtime: Runtime,
    submit: Callable[[Call], tuple[Any, StepFuture]],
    call: Call,
    fed_back: Mapping[int, int],
    count: int,
) -> tuple[Any, tuple[RecordedStep, ...]]:
    """Runs steps in a row, and waits for each.

    Args:
      call: the call of the first step.
      fed_back: from the position of an argument leaf to the position of the result leaf that replaces it.

    Returns: the last result, and the record of each step.
    Raises: as a call. The caller's donated arrays then stand for the last state.
    """
    first, result, steps = call, None, list[RecordedStep]()
    attempt = runtime.attempt
    try:
        for number in range(count):
            if number:
                call = _next_call(call, jax.tree.leaves(result), fed_back)
            called = time.perf_counter_ns()
            result, future = submit(call)
            replies = future.replies()
            returned = time.perf_counter_ns()
            before, attempt = attempt, runtime.attempt
            processes = tuple(times for reply in replies for times in reply.times)
            steps.append(RecordedStep(host_here(), called, returned, processes, attempt != before))
    except BaseException as error:  # also an interrupt
        if result is not None:
            hand_back(first, jax.tree.leaves(result), fed_back)
            error.add_note(
                f"step.profile: {len(steps)} of {count} steps have ended. Donated arrays of groups are now "
                "the state that the last step returns; its other results are lost"
            )
        raise
    return result, tuple(steps)


def _next_call(call: Call, results: Sequence[Any], fed_back: Mapping[int, int]) -> Call:
    leaves = (results[fed_back[i]] if i in fed_back else leaf for i, leaf in enumerate(call.leaves))
    return dataclasses.replace(call, leaves=tuple(leaves))
