"""What is sent between stages whose groups divide the values along ``model``."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.ir.plan import Send
from mpmd.planner.candidate import Candidate
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.stages import CostModel
from mpmd.planner.trials.trials import StepSpec, Trials
from mpmd.simulate import Link
from tests.support.planned_steps import CLUSTER

WIDTH, HIDDEN, ROWS = 8, 64, 16
SLOW = Link(0.0, 1e6)
ONE_NODE = dataclasses.replace(CLUSTER, flops=1e12, memory_bandwidth=1e12, device_link=SLOW, node_link=SLOW)
TWO_NODES = dataclasses.replace(ONE_NODE, nodes=2, devices_per_node=2)


def step(params, x):
    """A mark between the two products of a pair: hidden units cross, which devices divide."""

    def loss_of(params, row):
        hidden = mpmd.mark_stage_end(jnp.tanh(row @ params["up"]))
        return jnp.mean(hidden @ params["down"])

    def of_microbatch(row):
        return jax.value_and_grad(loss_of)(params, row)

    loss, grads = mpmd.treduce(of_microbatch, x, mpmd.Std1F1B(2), operation=mpmd.Mean)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


@pytest.mark.parametrize(("cluster", "share"), [(ONE_NODE, 0.5), (TWO_NODES, 1.0)])
def test_counts_what_the_link_carries(cluster, share):
    params = {
        "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), "float32"),
        "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), "float32"),
    }
    x = jax.ShapeDtypeStruct((4, ROWS, WIDTH), "float32")
    trials = Trials(StepSpec.of(step, (params, x)), cluster)
    (profile,) = trials.profiles
    assert profile.layers[1].divisions["model"].received == 1.0
    candidate = Candidate((1, 1), ({"model": 2},) * 2, mpmd.Std1F1B(2), 4, remat=False, fsdp=False)
    realized = trials.realize(candidate)
    sent = {name for i in realized.plan.programs[0].instructions if isinstance(i, Send) for name in i.values}
    hidden = [name for name in sent if realized.plan.avals()[name].shape == (ROWS, HIDDEN)]
    whole = ROWS * HIDDEN * 4
    assert hidden and {realized.message_bytes((0, 1), name) for name in hidden} == {share * whole}
    formula = evaluate(CostModel(profile, cluster), candidate).prediction
    assert formula.seconds == pytest.approx(realized.prediction.seconds, rel=0.1)
    assert formula.seconds == pytest.approx(6 * share * whole / SLOW.bandwidth, rel=0.6), "messages dominate"
