"""Connections that are slow, of steps on Ray: each is the first finding, and all times add up.

They go through a proxy, which lets everything wait for many times what this machine may lose by other work.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cluster
import mpmd
from cluster.start.connect import StartingActors
from tests.attribution.test_identities import check
from tests.ray.conftest import PATIENCE
from tests.support.proxy import Delay, Proxy

pytestmark = [
    pytest.mark.filterwarnings("ignore:group . .* of the operations:mpmd.PerformanceWarning"),
    pytest.mark.slow,  # whatever else keeps the machine busy is a fault, too
]

GROUPS, MICROBATCHES, ROWS, WIDTH = 3, 12, 16, 128


def step(weights, batch):
    """A step of three stages."""

    def loss_of(weights, batch):
        x = batch["x"] + batch["unused"][0]
        for number, weight in enumerate(weights):
            x = jnp.tanh(x @ weight)
            if number < GROUPS - 1:
                x = mpmd.mark_stage_end(x)
        return (x**2).mean()

    loss, gradients = mpmd.treduce(
        lambda microbatch: jax.value_and_grad(loss_of)(weights, microbatch),
        batch,
        schedule=mpmd.Std1F1B(GROUPS),
        operation=mpmd.Add,
    )
    return jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, gradients), loss


@pytest.fixture(scope="module")
def slow():
    """The delays of the connection of group 0 to group 1, and of that of the driver to group 0."""
    return {"link": Delay(), "driver": Delay()}


@pytest.fixture(scope="module")
def mesh(local_ray, slow):
    """Three groups, with two connections through proxies."""
    call = StartingActors.call
    with contextlib.ExitStack() as proxies, pytest.MonkeyPatch.context() as patch:

        def through_proxies(self, method, arguments):
            if method == "connect":
                route, gathering, addresses, *others = arguments[0]
                network = addresses[1].transports["network"]
                proxy = proxies.enter_context(Proxy(network, slow["link"]))
                behind = addresses[1]._replace(transports={"network": proxy.address})
                arguments = [
                    (route, gathering, [addresses[0], behind, addresses[2]], *others),
                    *arguments[1:],
                ]
            results = call(self, method, arguments)
            if method == "await_driver":
                results[0] = proxies.enter_context(Proxy(results[0], slow["driver"])).address
            return results

        patch.setattr(StartingActors, "call", through_proxies)
        mesh = cluster.launch(
            {"stage": GROUPS}, "stage", cpus_per_group=0.25, transport="network", timeout=PATIENCE
        )
        with mesh:
            yield mesh


def profile_of(mesh, unused=1):
    """The profile of five steps, of whose parts all is checked that must add up."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(GROUPS)]
    batch = {
        "x": rng.normal(size=(MICROBATCHES, ROWS, WIDTH)).astype(np.float32),
        "unused": np.zeros((MICROBATCHES, unused), np.float32),
    }
    loaded = mpmd.jit(step, mesh).compile(weights, batch)
    loaded(weights, batch)  # connects the groups
    profile = loaded.profile(weights, batch, steps=5)
    check(profile.attribution)
    measured = profile.attribution.measured
    recorded = profile.recorded[measured.step]
    assert measured.returned == recorded.returned - recorded.called
    assert profile.steps[0].error < 1000, "all processes of a machine read one clock"
    for group, causes in enumerate(profile.attribution.by_group):
        worked = sum(measured.durations[task] for task in measured.tasks(group))
        assert worked + sum(causes) == measured.returned
    return profile


@pytest.mark.slow
def test_a_slow_link(mesh, slow):
    with slow["link"].of(0.05):
        profile = profile_of(mesh)
    first = profile.findings[0]
    assert first.cause == "message", profile
    assert first.text.startswith("link 0 to 1: "), profile


@pytest.mark.slow
def test_a_late_driver(mesh, slow):
    with slow["driver"].of(0.05):
        profile = profile_of(mesh, unused=2**14)
    first = profile.findings[0]
    assert first.cause == "driver", profile
    assert "group 0 last" in first.text, profile
