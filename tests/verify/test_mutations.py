"""Whatever is changed in a plan, verify finds it, or it changes nothing that matters."""

import pytest

import mpmd
from tests.support.models import CLIPPED_ADAM, SGD, batch, init, make_step, mse, planned, weights
from tests.support.parity import mesh_of
from tests.support.plans import pipeline_plan
from tests.verify.mutations import assert_found_or_harmless

SPLIT_BACKWARDS = """
0  F0 F1 .  A0 W0 A1 W1
1  .  F0 A0 F1 A1 W0 W1
"""


@pytest.mark.usual("interleaved 1F1B", "split backwards")
@pytest.mark.parametrize(
    "schedule",
    [
        mpmd.GPipe(2),
        mpmd.Std1F1B(3),
        mpmd.Interleaved1F1B(4, 2),
        mpmd.CustomSchedule.from_text(SPLIT_BACKWARDS),
    ],
    ids=["GPipe", "1F1B", "interleaved 1F1B", "split backwards"],
)
def test_every_mutation_of_a_plan_of_a_schedule(schedule):
    found = assert_found_or_harmless(pipeline_plan(schedule, 2))
    assert found[True] > 500 and found[False] < found[True] / 20


def tied(params, x, y):
    """The first stage's weight is used by the last stage, too."""
    last = {"w": params[-1]["w"] + params[0]["w"], "b": params[-1]["b"]}
    return mse([*params[:-1], last], x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "schedule", "optimizer"),
    [(mse, mpmd.Std1F1B(2), CLIPPED_ADAM), (tied, mpmd.Interleaved1F1B(4, 2), SGD)],
    ids=["global norm and AdamW", "tied weights, several stages per group"],
)
def test_every_mutation_of_a_plan_of_a_step(loss_fn, schedule, optimizer):
    state = init(weights(schedule.num_stages), optimizer)
    step = make_step(loss_fn, schedule, optimizer)
    lowered = planned(step, state, *batch(2), groups=schedule.mpmd_dim, donate_argnums=0)
    found = assert_found_or_harmless(lowered.plan)
    assert found[True] > 1000 and found[False] < found[True] / 50


def test_every_mutation_of_a_plan_without_a_loop():
    """Its arguments are sent, and taken over by what is made of them."""

    def product_and_norms(params):
        product = params[0]["w"] @ params[1]["w"] @ params[2]["w"]
        return product, [(layer["w"] * layer["b"]).sum() for layer in params]

    with mesh_of(3) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(3)), mesh)
        (params, _), _ = step(init(weights(3)), *batch(2))
        plan = mpmd.jit(product_and_norms, mesh, donate_argnums=0).compile(params).plan
    found = assert_found_or_harmless(plan)
    assert found[True] > 20 and found[False] < found[True] / 5
