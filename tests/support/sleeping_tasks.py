"""Tasks that sleep instead of computing, so that many groups fit on few cores and times are known."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from mpmd.ir.plan import Cell, Plan, Task
from mpmd.runtime import worker


def sleep_in_tasks(seconds_of: Callable[[Task], float]) -> None:
    """Has the tasks of programs that this process loads from now on take the seconds of ``seconds_of``.

    On a group, tasks with equal executables have to take equally long. What runs before and after the loop
    takes its own time.
    """

    class SleepingExecutor(worker.Executor):
        def __init__(self, plan: Plan, mpmd_idx: int, executables, **options):
            durations = {
                run.executable: sum(map(seconds_of, run.task.tasks))
                for run in plan.programs[mpmd_idx].runs
                if isinstance(run.task, Cell)
            }
            slow = {name: _lasting(executables[name], length) for name, length in durations.items()}
            super().__init__(plan, mpmd_idx, executables={**executables, **slow}, **options)

    worker.Executor = SleepingExecutor  # type: ignore[misc, assignment]


def _lasting(call: Callable, seconds: float) -> Callable:
    def lasting(*arguments):
        end = time.perf_counter() + seconds
        results = jax.block_until_ready(call(*arguments))
        time.sleep(max(0.0, end - time.perf_counter()))
        return results

    return lasting
