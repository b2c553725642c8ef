"""Whatever is changed in the plan of a compiled step, verify finds it, or it changes nothing that matters."""

import pytest

import mpmd
from tests.support.models import CLIPPED_ADAM, SGD, batch, init, make_step, mse, weights
from tests.support.mutations import assert_found_or_harmless
from tests.support.parity import mesh_of


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
def test_every_mutation_is_found_or_harmless(loss_fn, schedule, optimizer):
    state = init(weights(schedule.num_stages), optimizer)
    step = make_step(loss_fn, schedule, optimizer)
    with mesh_of(schedule.mpmd_dim) as mesh:
        compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)
        plan = compiled.compile(state, *batch(2)).plan
    found = assert_found_or_harmless(plan)
    assert found[True] > 1000 and found[False] < found[True] / 50


def test_every_mutation_of_a_plan_without_a_loop_is_found_or_harmless():
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
