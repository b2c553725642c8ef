"""The metrics of recoveries that Ray's Prometheus endpoints show."""

from __future__ import annotations

from ray.util.metrics import Counter, Histogram

from cluster.recovery.report import RecoveryReport

_BOUNDARIES = [0.5, 1, 2, 5, 10, 30, 60, 300]
"""Of the histogram, in seconds."""


class RecoveryMetrics:
    """The driver's metrics; Ray puts ``ray_`` before their names, and ``_total`` behind those of counters.

    ``mpmd_recoveries`` counts recoveries and moves, by ``values``, whether these were ``restored`` or
    ``lost``, and by ``kind``, as of ``RecoveryReport``.
    ``mpmd_recovery_seconds`` is a histogram, by ``phase``, as of ``RecoveryReport``, or ``total``.
    ``mpmd_replayed_steps`` counts the steps that were run again.
    """

    def __init__(self) -> None:
        self._recoveries = Counter(
            "mpmd_recoveries", "Times that groups were replaced or moved.", ("values", "kind")
        )
        self._seconds = Histogram(
            "mpmd_recovery_seconds", "Seconds of a recovery, by phase.", _BOUNDARIES, ("phase",)
        )
        self._steps = Counter("mpmd_replayed_steps", "Steps that were run again after a recovery.")

    def add(self, report: RecoveryReport) -> None:
        """Adds a recovery."""
        values = "restored" if report.lost is None else "lost"
        self._recoveries.inc(tags={"values": values, "kind": report.kind})
        for phase, seconds in {**report.seconds, "total": report.total}.items():
            self._seconds.observe(seconds, {"phase": phase})
        if report.num_replayed:
            self._steps.inc(report.num_replayed)
