"""The numbers of a run, as they are reported to Ray."""

import time
import weakref
from concurrent.futures import Future

import pytest

from cluster import metrics
from cluster.metrics import RunMetrics
from cluster.recovery import RecoveryReport
from mpmd.runtime import step_meter
from mpmd.runtime.device_memory import MemoryUse
from mpmd.runtime.requests import StepReply
from mpmd.runtime.step_meter import StepMeter, StepMeters
from tests.support.ray_metrics import Metric
from tests.support.waiting import await_that


class Run:
    """A mesh of which nothing runs, with its meters, and what was reported of it."""

    recovery_seconds = ()

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(step_meter.time, "perf_counter", lambda: self.now)
        made = Metric.in_place_of_rays(monkeypatch)
        self.meters, self.recoveries = StepMeters(), []
        self.metrics = RunMetrics(self.meters, self.recoveries)
        self.made = {metric.prometheus_name.removeprefix("ray_mpmd_"): metric for metric in made}

    def function(self, name):
        meter = StepMeter(name, self)
        self.meters.add(meter)
        return meter

    def step(self, meter, begun, ended, memory=None, has_failed=False):
        self.now = begun
        end = meter.begin(lambda: 0)
        reply = Future()
        meter.read_memory({1: reply})
        reply.set_result(StepReply({}, memory=memory))
        self.now = ended
        end(has_failed)

    def values(self, name):
        return self.made[name].values

    def sums(self, name):
        return dict(self.made[name].sums)


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def test_steps_are_reported_by_function_and_added_once(run):
    train, evaluate = run.function("train"), run.function("evaluate")
    run.step(train, 100, 101)
    run.step(train, 103, 104)
    run.step(train, 104, 105, has_failed=True)
    evaluate.begin(lambda: 0)
    for _ in range(2):
        run.metrics.report()
    assert run.sums("steps_total") == {("train",): 2}
    assert run.sums("failed_steps_total") == {("train",): 1}
    assert run.sums("driver_seconds_total") == {("train",): 2}
    assert run.values("step_seconds") == {("train",): 3}
    assert run.values("steps_under_way") == {("train",): 0, ("evaluate",): 1}
    run.step(train, 105, 106)
    run.metrics.report()
    assert run.sums("steps_total") == {("train",): 3}


def test_steps_of_dropped_functions_are_reported_once(run):
    for begun in (100, 200):
        train = run.function("train")
        run.step(train, begun, begun + 1)
        run.metrics.report()
        run.step(train, begun + 3, begun + 4)
        run.step(train, begun + 4, begun + 5, has_failed=True)
        del train
    kept = run.function("train")
    run.step(kept, 300, 301)
    for _ in range(2):
        run.metrics.report()
    assert run.sums("steps_total") == {("train",): 5}
    assert run.sums("failed_steps_total") == {("train",): 2}
    assert run.sums("driver_seconds_total") == {("train",): 4}


def test_totals_of_dropped_functions_are_not_kept_one_by_one(run):
    dropped = [weakref.ref(run.function("train").totals) for _ in range(3)]
    run.function("evaluate")
    assert [totals() for totals in dropped] == [None] * 3


def test_nothing_is_reported_after_the_connection_has_ended(run, monkeypatch):
    train = run.function("train")
    run.step(train, 100, 101)
    run.metrics.start(run)
    time.sleep(0.05)  # the thread waits for the next report
    monkeypatch.setattr(metrics.RaySession, "is_connected", False)
    run.metrics.close()
    assert run.sums("steps_total") == {}


def test_an_error_of_rays_metrics_is_logged_once_and_ends_the_reports(run, monkeypatch, caplog):
    def refuse(*arguments):
        raise ValueError("refused")

    train = run.function("train")
    run.step(train, 100, 101)
    monkeypatch.setattr(Metric, "inc", refuse)
    monkeypatch.setattr(metrics, "REPORT_SECONDS", 0.01)
    run.metrics.start(run)
    await_that(lambda: caplog.records)
    run.metrics.close()  # would report once more
    (record,) = caplog.records
    assert record.message.startswith("The run goes on") and str(record.exc_info[1]) == "refused"


def test_memory_is_of_the_function_that_has_run_last(run):
    train, evaluate = run.function("train"), run.function("evaluate")
    run.step(evaluate, 100, 101, MemoryUse(10, 20, 30))
    run.step(train, 102, 103, MemoryUse(11, None, None))
    run.metrics.report()
    assert run.values("host_memory_bytes") == {("1",): 11}
    assert run.values("device_memory_bytes") == {("1",): 20}
    run.step(evaluate, 104, 105, MemoryUse(12, 22, 32))
    run.metrics.report()
    assert run.values("host_memory_bytes") == {("1",): 12}
    assert run.values("device_memory_peak_bytes") == {("1",): 32}


def test_recoveries_are_counted_by_what_became_of_the_values(run):
    run.recoveries.append(RecoveryReport((1,), "group 1 died", 7, 3, {"started": 1.5, "loaded": 0.5}))
    run.metrics.report()
    run.recoveries.append(RecoveryReport((0, 1), "both died", None, 0, {"started": 2.0}, "both have died"))
    run.recoveries.append(RecoveryReport((1,), "there is room", None, 0, {"loaded": 0.25}, kind="grown"))
    for _ in range(2):
        run.metrics.report()
    assert run.sums("recoveries_total") == {
        ("restored", "died"): 1,
        ("lost", "died"): 1,
        ("restored", "grown"): 1,
    }
    assert run.sums("replayed_steps_total") == {(): 3}
    assert run.sums("recovery_seconds") == pytest.approx(
        {("started",): 3.5, ("loaded",): 0.75, ("total",): 4.25}
    )
