"""Recoveries in Ray's metrics."""

import collections

import pytest

from cluster.recovery import RecoveryReport, metrics


class Metric:
    """In place of Ray's: has all that was added."""

    def __init__(self, name, description, *options):
        self.tag_keys = options[-1] if options else ()
        self.sums = collections.Counter()
        self.counts = collections.Counter()

    def inc(self, value=1.0, tags=None):
        assert value > 0, "Ray refuses others"
        self.observe(value, tags or {})

    def observe(self, value, tags):
        assert set(tags) == set(self.tag_keys)
        self.sums[tuple(tags.values())] += value
        self.counts[tuple(tags.values())] += 1


def test_recoveries_are_counted_by_what_became_of_the_values(monkeypatch):
    monkeypatch.setattr(metrics, "Counter", Metric)
    monkeypatch.setattr(metrics, "Histogram", Metric)
    added = metrics.RecoveryMetrics()
    added.add(RecoveryReport((1,), "group 1 died", 7, 3, {"started": 1.5, "loaded": 0.5}))
    added.add(RecoveryReport((0, 1), "group 0 died", None, 0, {"started": 2.0}, "both have died"))
    added.add(RecoveryReport((1,), "there is room", None, 0, {"loaded": 0.25}, kind="grown"))
    assert added._recoveries.sums == {("restored", "died"): 1, ("lost", "died"): 1, ("restored", "grown"): 1}
    assert added._steps.sums == {(): 3}
    assert added._seconds.counts == {("started",): 2, ("loaded",): 2, ("total",): 3}
    assert added._seconds.sums["total",] == pytest.approx(4.25)
