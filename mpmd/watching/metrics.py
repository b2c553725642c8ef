"""``mpmd.metrics``: the numbers of each step of a function, for TensorBoard and the like."""

from __future__ import annotations

import collections
import functools
import inspect
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpmd.runtime.device_memory import MemoryUse
from mpmd.runtime.step_meter import StepEnd, StepMeter
from mpmd.util.notebook import ShownAsText
from mpmd.validation import Fault, callable_fault, int_fault, number_fault, raise_faults, shown

Write = Callable[[int, dict[str, float]], object]


def metrics(
    step: Any,
    write: Write,
    *,
    examples: float | None = None,
    tokens: float | None = None,
    every: int = 1,
    first_step: int = 0,
) -> Metrics:
    """Hands the metrics of a function's steps to ``write``, until the end of ``with``, or ``close``::

        with mpmd.metrics(step, writer.write_scalars, examples=256):
            for batch in batches:
                state, loss = step(state, batch)

    Nothing about the loop changes. The groups get no further requests: their replies to steps say when a step
    has ended.

    ``write`` is called in the thread that calls the step, when the call has handed a later step to the
    groups, so that it may take its time while they work. The last steps are written at the end of ``with``,
    which waits for them. If ``write`` raises, the steps go on unharmed: the next call of the step raises the
    exception, before anything of that step runs, or else the end of ``with``.

    ``write`` gets the number of the step, and a dict of numbers. They are means over the steps since the last
    dict, unless the list says otherwise:

    - ``step_seconds``: from the end of the step before to the end of this one, however many are under way; of
      the first step, from its call. Its inverse is the rate of the run.
    - ``driver_seconds``: the part of ``step_seconds`` in which no step of the function was under way, because
      the driver had not called the next one: it loaded data, saved, or evaluated.
    - ``examples_per_second``, ``tokens_per_second``: if it is said how many a step has.
    - ``bytes_sent``: of the messages between groups in a step, as planned.
    - ``failed_steps``: since the beginning. A failed step has no number, and its time counts to the next one.
    - ``recoveries``, ``recovery_seconds``: of the mesh since it was launched, and their duration in all. A
      recovery counts once all steps that it repeats are answered.
    - ``host_memory_bytes``: of the process of a group that has most, measured once a second at most.
    - ``device_memory_bytes``, ``device_memory_peak_bytes``: allocated on the device that has most, at the end
      of a step, and at any time before; not on CPUs.

    Args:
      step: the result of ``mpmd.jit``, before or after its first call, or a compiled step. All steps of the
        same ``mpmd.jit`` count, for any shapes.
      write: a function of the number of a step and a dict.
      examples: how many examples a step trains on.
      tokens: how many tokens a step trains on.
      every: for how many steps ``write`` is called once, with the number of the last one.
      first_step: the number of the first step, where a run goes on from a checkpoint.

    Raises: ``TypeError`` or ``ValueError`` for arguments that are wrong, all at once.
    """
    raise_faults(
        _step_fault(step),
        _write_fault(write),
        number_fault("examples", examples, "a number of examples", above=0, finite=True, optional=True),
        number_fault("tokens", tokens, "a number of tokens", above=0, finite=True, optional=True),
        int_fault("every", every),
        int_fault("first_step", first_step, 0),
        title="mpmd.metrics: ",
    )
    units = {"examples_per_second": examples, "tokens_per_second": tokens}
    return Metrics(
        step.meter,
        write,
        {name: count for name, count in units.items() if count is not None},
        every,
        first_step,
    )


class Metrics(ShownAsText):
    """Writes the metrics of steps until ``close``; made by ``mpmd.metrics``. A context manager.

    A notebook or a terminal shows how many steps there were so far, and how long one takes.

    Args:
      meter: counts the steps.
      write: takes the number of a step and a dict.
      per_second: units of a step by metric, such as ``{"examples_per_second": 256}``.
      every: the number of steps of one dict.
      first_step: the number of the first step.
    """

    def __init__(
        self, meter: StepMeter, write: Write, per_second: dict[str, float], every: int, first_step: int
    ):
        self._meter = meter
        self._write = write
        self._every = every
        self._window = _Window(per_second, first_step)
        self._ends: collections.deque[StepEnd] = collections.deque()
        self._writing = threading.Lock()
        self._error: Exception | None = None
        self._since = time.perf_counter()
        meter.add_listener(self)

    def shown(self) -> str:
        totals, seconds = self._meter.totals, self._meter.seconds_per_step
        text = f"mpmd.metrics of {totals.name}: {totals.ended} steps have ended"
        text += f", {self._meter.under_way} are under way"
        if totals.failed:
            text += f", {totals.failed} have failed"
        return text if seconds is None else f"{text}; one takes {seconds:.3g} s"

    def add(self, end: StepEnd) -> None:
        if end.begun >= self._since:
            self._ends.append(end)

    def check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def hand_over(self) -> None:
        if self._ends and self._error is None:
            self._write_ended()

    def _write_ended(self) -> None:
        """Writes the metrics of the steps that have ended, unless a call of ``write`` is under way."""
        if not self._writing.acquire(blocking=False):
            return  # another thread does it, or ``write`` has called a step
        try:
            while self._ends and self._error is None:
                self._window.add(self._ends.popleft())
                if self._window.num_steps == self._every:
                    self._write_window()
        finally:
            self._writing.release()

    def _write_window(self) -> None:
        step, values = self._window.take(self._meter)
        try:
            self._write(step, values)
        except Exception as error:
            error.add_note(
                f"mpmd.metrics: `write` has failed for the metrics of step {step}. The steps are unharmed: "
                "this is raised between two of them"
            )
            self._error = error

    def close(self) -> None:
        """Waits for the steps that were called, and writes their metrics. May be called again.

        Raises: an exception of ``write`` that no call of the step has raised.
        """
        try:
            self._meter.wait()
        finally:  # also where an interrupt ends the wait
            self._end()
        self.check()

    def _end(self) -> None:
        self._meter.remove_listener(self)
        self.hand_over()
        if self._window.num_steps and self._error is None:
            self._write_window()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        self._end()  # does not wait: the steps may be what has failed, or the user wants to stop
        if self._error is not None and self._error is not error:
            error.add_note(
                f"mpmd.metrics: `write` has failed, too: {type(self._error).__name__}: {self._error}"
            )
            self._error = None


class _Window:
    """The steps since the last dict was written."""

    def __init__(self, per_second: dict[str, float], first_step: int):
        self._per_second = per_second
        self._next_step = first_step
        self._failed = 0
        self._counted_until: float | None = None  # the end of the last step that has a number
        self._busy_until: float | None = None  # of the last step at all
        self._seconds = self._driver_seconds = 0.0
        self._bytes_sent = self.num_steps = 0
        self._measured: Mapping[int, MemoryUse] = {}
        self._memory: dict[str, float] = {}  # the metrics of what was measured

    def add(self, end: StepEnd) -> None:
        if self._busy_until is None or self._counted_until is None:
            self._busy_until = self._counted_until = end.begun
        self._driver_seconds += max(0.0, end.begun - self._busy_until)
        self._busy_until = max(self._busy_until, end.ended)
        if end.has_failed:
            self._failed += 1
            return
        self._seconds += end.ended - self._counted_until
        self._counted_until = end.ended
        self._bytes_sent += end.bytes_sent
        self.num_steps += 1
        self._next_step += 1

    def take(self, meter: StepMeter) -> tuple[int, dict[str, float]]:
        """Returns the number of the last step and the metrics, and begins the next window."""
        recoveries = meter.recovery_seconds
        if (measured := meter.memory) is not self._measured and measured:
            self._measured, self._memory = measured, _memory(measured.values())
        values: dict[str, float] = {
            "step_seconds": self._seconds / self.num_steps,
            "driver_seconds": self._driver_seconds / self.num_steps,
            "bytes_sent": self._bytes_sent / self.num_steps,
            "failed_steps": self._failed,
            "recoveries": len(recoveries),
            "recovery_seconds": sum(recoveries),
            **self._memory,
        }
        for name, count in self._per_second.items():
            values[name] = count * self.num_steps / self._seconds
        self._seconds = self._driver_seconds = 0.0
        self._bytes_sent = self.num_steps = 0
        return self._next_step - 1, values


def _memory(measured: Iterable[MemoryUse]) -> dict[str, float]:
    """Returns the largest numbers of any group; numbers of devices are left out on CPUs."""
    most = functools.reduce(operator.or_, measured)
    numbers = {
        "host_memory_bytes": most.host,
        "device_memory_bytes": most.device,
        "device_memory_peak_bytes": most.device_peak,
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _step_fault(step: Any) -> Fault | None:
    if isinstance(getattr(step, "meter", None), StepMeter):
        return None
    return TypeError(
        f"step must be the result of mpmd.jit, or a compiled step, whose calls are counted; not {shown(step)}"
    )


def _write_fault(write: Any) -> Fault | None:
    if fault := callable_fault("write", write):
        return fault
    try:
        signature = inspect.signature(write)
    except (TypeError, ValueError):  # of a function in C, which need not say
        return None
    try:
        signature.bind(0, {})
    except TypeError as error:
        return TypeError(
            f"write must take two arguments, the number of a step and a dict, and {shown(write)} cannot be "
            f"called so: {error}"
        )
    return None
