"""Metrics of a run on Ray, as the driver gets them, and as Ray shows them to Prometheus."""

import re
import urllib.request

import jax
import pytest
import ray

import cluster
import mpmd
from tests.support.models import init, make_step, mse, weights
from tests.support.waiting import await_that
from tests.watching.test_metrics import train

SECONDS = 60
TRAIN_STEP = make_step(mse, mpmd.Std1F1B(2))


def test_metrics_of_each_step(two_process_groups):
    step, written = mpmd.jit(TRAIN_STEP, two_process_groups), []
    with mpmd.metrics(step, lambda *each: written.append(each), examples=16):
        train(step, init(weights(2)), 5)
    assert [number for number, _ in written] == [0, 1, 2, 3, 4]
    for _, values in written:
        assert values["step_seconds"] > 0 and values["bytes_sent"] > 0
        assert values["host_memory_bytes"] > 2**20 and values["recoveries"] == 0


def shown_by_ray(function):
    """The metrics of one run of ``function``, as Ray shows them to Prometheus: names and values."""
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=SECONDS) as answer:
        samples = re.findall(r"^ray_mpmd_(\w+)\{(.*)\} (\S+)$", answer.read().decode(), re.MULTILINE)
    runs = {re.search(r'run=".*?"', labels)[0] for _, labels, _ in samples if function in labels}
    return {(name, float(value)) for name, labels, value in samples if any(run in labels for run in runs)}


@pytest.mark.slow
def test_a_recovery_is_in_both_metrics(local_ray):
    def recovered_step(*arguments):
        return TRAIN_STEP(*arguments)

    recovery = cluster.Recovery(every=2)
    with cluster.launch(
        {"stage": 2}, "stage", cpus_per_group=0.25, recovery=recovery, timeout=SECONDS
    ) as mesh:
        step, written = mpmd.jit(recovered_step, mesh), []
        with mpmd.metrics(step, lambda *each: written.append(each)):
            state = jax.block_until_ready(train(step, init(weights(2)), 3))
            ray.kill(mesh.runtime.actors[1])
            state = jax.block_until_ready(train(step, state, 2))
            # It is reported when the steps that it repeats are answered.
            await_that(lambda: mesh.recoveries, SECONDS)
            state = jax.block_until_ready(train(step, state, 1))
        assert [number for number, _ in written] == list(range(6))
        assert written[0][1]["recoveries"] == 0 and written[-1][1]["recoveries"] == 1
        assert written[-1][1]["recovery_seconds"] == pytest.approx(sum(mesh.recovery_seconds))
    # Closing the mesh has reported the last numbers, which Ray shows a moment later.
    expected = {("steps_total", 6), ("recoveries_total", 1)}
    await_that(lambda: shown_by_ray("recovered_step") >= expected, SECONDS)
