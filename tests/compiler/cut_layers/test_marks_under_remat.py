"""What stages keep for their backwards under ``jax.checkpoint``, and where they compute it again."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.compiler.jaxprs.equations import size
from mpmd.ir.plan import TaskType
from tests.support.levels import task_graph
from tests.support.models import BATCH, WIDTH, batch, layer, rows, sgd_step, squares
from tests.support.programs.scanned_layers import model, stacked, two_products

ONE = BATCH * WIDTH  # what enters a stage
SAVE_DOTS = jax.checkpoint_policies.dots_saveable


def split_step(loss, params):
    return task_graph(sgd_step(loss, mpmd.GPipe(3)), params, *batch(), groups=3)


def unrolled(params, x, y):
    h = x
    for i in range(3):
        p = rows(params["layers"], i)
        h = mpmd.mark_stage_end(two_products(p, two_products(p, h)))
    return squares(h, y)


def kept(graph, stage):
    """How many elements the backward of a stage reads of what forwards made."""
    made = {var for member in graph.stage_work if member.work.kind == "fwd" for var in member.makes}
    (backward,) = (member for member in graph.stage_work if member.work == TaskType("bwd", stage))
    return sum(size(var) for var in backward.reads if var in made)


@pytest.mark.parametrize(
    "loss", [unrolled, model(lambda h, p: two_products(p, h), every=4)], ids=["marks", "scan"]
)
def test_a_loss_under_remat_keeps_what_enters_each_stage(loss):
    params = stacked(12 if loss is not unrolled else 3)
    graph = split_step(jax.checkpoint(loss), params)
    assert kept(graph, 1) == ONE
    assert kept(split_step(loss, params), 1) > 2 * ONE


def test_what_a_policy_saves_is_kept_by_the_stage_that_made_it():
    graph = split_step(jax.checkpoint(model(every=4), policy=SAVE_DOTS), stacked(12))
    assert kept(graph, 1) >= 4 * ONE
    recomputed = {eqn.primitive.name for member in graph.stage_work for eqn in member.eqns}
    assert "remat2" not in recomputed and "checkpoint" not in recomputed


def test_a_recomputation_that_carries_a_count_stays_in_its_stage():
    def loss(params, x, y):
        def body(carry, p):
            h, count = carry
            return mpmd.mark_stage_end((layer(p, jnp.sin(h * count)), count + 1.0), every=2), None

        (h, _), _ = jax.lax.scan(body, (x, jnp.float32(1)), params["layers"])
        return squares(h, y)

    graph = split_step(jax.checkpoint(loss), stacked())
    assert kept(graph, 1) == ONE + 1
