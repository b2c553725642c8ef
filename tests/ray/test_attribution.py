"""The causes of idle times on Ray, of groups of several processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.attribution.findings import loads_of
from tests.attribution.test_identities import check

pytestmark = pytest.mark.filterwarnings("ignore:group . .* of the operations:mpmd.PerformanceWarning")

WIDTH, ROWS, MICROBATCHES = 256, 64, 4


def step(weights, xs):
    """The second of two stages has 200 times the work of the first one."""

    def loss_of(weights, x):
        h = mpmd.mark_stage_end(jnp.tanh(x @ weights[0]))
        for _ in range(200):
            h = jnp.tanh(h @ weights[1])
        return (h**2).mean()

    loss, grads = mpmd.treduce(
        lambda x: jax.value_and_grad(loss_of)(weights, x), xs, mpmd.Std1F1B(2), operation=mpmd.Add
    )
    return jax.tree.map(lambda weight, grad: weight - 0.01 * grad, weights, grads), loss


@pytest.mark.slow
def test_causes_add_up_and_a_group_with_more_work_is_found(two_process_groups):
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(2)]
    xs = rng.normal(size=(MICROBATCHES, ROWS, WIDTH)).astype(np.float32)
    jitted = mpmd.jit(step, two_process_groups, in_specs=(P(), P(None, "fsdp")))
    loaded = jitted.lower(weights, xs).compile()
    loaded(weights, xs)  # connects the groups
    profile = loaded.profile(weights, xs, steps=3)
    attribution = profile.attribution
    check(attribution)
    assert len(profile.steps[0].processes) == 4
    assert profile.steps[0].error < 1000, "all processes of a machine read one clock"
    measured = attribution.measured
    assert all(measured.processor[task] for group in measured.groups for task in measured.tasks(group))
    loads = loads_of(attribution)
    assert loads[1] > 1.9 * sum(loads.values()) / 2
    imbalance = [finding for finding in profile.findings if finding.cause == "imbalance"]
    # Where all groups compute one after the other, equal stages save nothing.
    assert len(imbalance) == 1 or measured.at_once <= 1
    assert all("its process computed" in finding.text for finding in imbalance)
