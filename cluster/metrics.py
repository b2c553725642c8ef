"""The numbers of a run in Ray's metrics, which Prometheus collects and Grafana draws.

What the driver has counted of steps, memory and recoveries enters; values of Ray's gauges and counters leave.
``launch`` starts one ``RunMetrics`` for each mesh. ``docs/watching.md`` has the names, and a query for each.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path

from ray.util.metrics import Counter, Gauge, Histogram

from cluster.driver.ray_session import RaySession
from cluster.recovery.report import RecoveryReport
from mpmd.runtime.step_meter import StepMeter, StepMeters, StepTotals

_logger = logging.getLogger(__name__)

REPORT_SECONDS = 5.0
"""Seconds between two reports. Ray forgets a gauge that is not set again within 20 s."""

_CLOSE_SECONDS = 5.0

_BOUNDARIES = [0.5, 1, 2, 5, 10, 30, 60, 300]
"""Upper ends of the histogram's buckets, in seconds."""

_BY_FUNCTION = ("run", "function")
_BY_GROUP = ("run", "group")

_STEP_COUNTERS = {
    "mpmd_steps": "Steps of a function that have ended.",
    "mpmd_failed_steps": "Steps of a function that have failed.",
    "mpmd_driver_seconds": "Seconds in which no step of a function was under way.",
}
_MEMORY_GAUGES = {
    "mpmd_host_memory_bytes": "Memory of the group's process that has most.",
    "mpmd_device_memory_bytes": "Bytes allocated on the group's device that has most.",
    "mpmd_device_memory_peak_bytes": "Most bytes that were ever allocated on a device of the group.",
}


class RunMetrics:
    """Reports the steps, memory and recoveries of one mesh to Ray.

    A thread of the driver reports what the driver counts anyway: it asks the groups nothing, and no step
    waits for it. Where Ray's metrics agent does not run, the reports are lost, and the run goes on. An error
    of Ray's metrics is logged, and ends the reports but not the run.

    Args:
      meters: count the steps of the mesh's functions.
      recoveries: the mesh's list of recoveries and moves, to which the runtime appends.
    """

    def __init__(self, meters: StepMeters, recoveries: Sequence[RecoveryReport]):
        self._meters = meters
        self._recoveries = recoveries
        self._run = {"run": f"{Path(sys.argv[0]).stem or 'python'}-{uuid.uuid4().hex[:6]}"}
        self._step_counters = [Counter(name, text, _BY_FUNCTION) for name, text in _STEP_COUNTERS.items()]
        self._memory_gauges = [Gauge(name, text, _BY_GROUP) for name, text in _MEMORY_GAUGES.items()]
        self._step_seconds = Gauge("mpmd_step_seconds", "Seconds per step of a function.", _BY_FUNCTION)
        self._under_way = Gauge("mpmd_steps_under_way", "Steps that were called and not ended.", _BY_FUNCTION)
        self._recovered = Counter(
            "mpmd_recoveries", "Times that groups were replaced or moved.", ("run", "values", "kind")
        )
        self._phase_seconds = Histogram(
            "mpmd_recovery_seconds", "Seconds of a recovery, by phase.", _BOUNDARIES, ("run", "phase")
        )
        self._replayed = Counter("mpmd_replayed_steps", "Steps that were run again.", ("run",))
        self._reported: dict[str, StepTotals] = {}  # by the function's name
        self._reported_recoveries = 0
        self._session = RaySession()
        self._ended = threading.Event()

    def start(self, runtime: object) -> None:
        """Reports every ``REPORT_SECONDS``, until ``close`` or until the user has dropped ``runtime``."""
        self._thread = threading.Thread(
            target=self._serve, args=(weakref.ref(runtime),), name="mpmd metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Reports once more, and ends the thread."""
        self._ended.set()
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self, runtime: weakref.ref[object]) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(REPORT_SECONDS) or runtime() is None
            if not self._session.is_connected:  # Ray would count the run in the next session
                return
            try:
                self.report()
            except Exception:
                if self._session.is_connected:  # else Ray was shut down during the report
                    _logger.exception("The run goes on, but is no longer reported to Ray's metrics")
                return

    def report(self) -> None:
        for totals in self._meters.totals():
            self._report_steps(totals)
        for meter in sorted(self._meters.all(), key=operator.attrgetter("last_end")):
            self._report_gauges(meter)  # a group's memory is set last by the function that has run last
        for report in self._recoveries[self._reported_recoveries :]:
            self._report_recovery(report)

    def _report_steps(self, totals: StepTotals) -> None:
        labels = {**self._run, "function": totals.name}
        before = self._reported.get(totals.name, StepTotals(totals.name))
        increases = (
            totals.ended - before.ended,
            totals.failed - before.failed,
            totals.driver_seconds - before.driver_seconds,
        )
        for counter, increase in zip(self._step_counters, increases, strict=True):
            if increase > 0:
                counter.inc(increase, labels)
        self._reported[totals.name] = totals

    def _report_gauges(self, meter: StepMeter) -> None:
        labels = {**self._run, "function": meter.name}
        self._under_way.set(meter.under_way, labels)
        if (seconds := meter.seconds_per_step) is not None:
            self._step_seconds.set(seconds, labels)
        for mpmd_idx, memory in meter.memory.items():
            for gauge, count in zip(self._memory_gauges, memory, strict=True):
                if count is not None:
                    gauge.set(count, {**self._run, "group": str(mpmd_idx)})

    def _report_recovery(self, report: RecoveryReport) -> None:
        self._reported_recoveries += 1
        values = "restored" if report.lost is None else "lost"
        self._recovered.inc(tags={**self._run, "values": values, "kind": report.kind})
        for phase, seconds in {**report.seconds, "total": report.total}.items():
            self._phase_seconds.observe(seconds, {**self._run, "phase": phase})
        if report.num_replayed:
            self._replayed.inc(report.num_replayed, self._run)
