"""A schedule for a loss without marks: the layers are cut into as many stages as it has."""

import logging

import pytest
from jax import lax

import mpmd
from tests.support.explicit import draws
from tests.support.models import (
    WIDTH,
    batch,
    descend,
    layer,
    planned,
    sgd_step,
    squares,
    stack,
    unmarked,
    weights,
)
from tests.support.parity import assert_like_jit

ROWS = 8
X, Y = draws(ROWS, WIDTH, seed=1), draws(ROWS, WIDTH, seed=2)


def loss_of(params, x, y):
    return squares(unmarked(params, x), y)


def stacked(params, x):
    return lax.scan(lambda h, p: (layer(p, h), None), x, params)[0]


def stacked_loss(params, x, y):
    return squares(stacked(params, x), y)


def trained(loss, schedule, **options):
    def step(params, x, y):
        value, grads = mpmd.value_and_grad(loss, num_microbatches=4, schedule=schedule, **options)(
            params, x, y
        )
        return descend(params, grads), value

    return step


def test_a_step_computes_what_jax_does(mesh):
    step = trained(loss_of, mpmd.Interleaved1F1B(4, 2))
    (loop,) = assert_like_jit(mesh, step, weights(4), X, Y).plan.loops
    assert len(loop.ends) == loop.num_stages - 1


def test_the_report_says_where_stages_end(caplog):
    with caplog.at_level(logging.INFO, "mpmd"):
        lowered = planned(trained(stacked_loss, mpmd.Std1F1B(3)), stack(weights(6)), X, Y, groups=3)
    lines = [
        "stages without marks, cut between layers:",
        f"  stage 0 ends after layer 2 of 6 at {__file__}:",
        f"  stage 1 ends after layer 4 of 6 at {__file__}:",
    ]
    for text in (
        str(lowered.report()),
        str(mpmd.explain(lowered)),
        lowered.plan.shown(),
        caplog.records[0].getMessage(),
    ):
        assert all(line in text for line in lines)
    assert len(caplog.records) == 1
    assert lowered.plan.loops[0].ends[0].endswith("(stacked)")


def test_marks_of_ones_own_are_left_as_they_are():
    def loss(params, x, y):
        return loss_of(params[2:], mpmd.mark_stage_end(unmarked(params[:2], x)), y)

    lowered = planned(trained(loss, mpmd.Std1F1B(2)), weights(4), X, Y)
    assert lowered.plan.loops[0].ends == ()
    assert "cut between layers" not in str(lowered.report())
    with pytest.raises(mpmd.CompileError, match="has 1 call of mark_stage_end, which ends 1 stage"):
        planned(trained(loss, mpmd.Std1F1B(4)), weights(4), X, Y, groups=4)


def test_stages_that_auto_marks_was_asked_for_are_shown_too():
    loss = mpmd.auto_marks(loss_of, num_stages=2)
    lowered = planned(trained(loss, mpmd.Std1F1B(2)), weights(4), X, Y)
    assert len(lowered.plan.loops[0].ends) == 1


def test_several_loops_have_their_own_stages():
    def step(params, x, y):
        total = 0.0
        for _ in range(2):
            params, value = trained(loss_of, mpmd.Std1F1B(2))(params, x, y)
            total += value
        return params, total

    lowered = planned(step, weights(4), X, Y)
    assert [len(loop.ends) for loop in lowered.plan.loops] == [1, 1]
    assert "stage 2 ends after layer" in str(lowered.report())


def test_an_evaluation(mesh):
    def step(params, x):
        return mpmd.treduce(
            lambda rows: unmarked(params, rows),
            mpmd.microbatches(x, 4),
            schedule=mpmd.ForwardOnly(2, 2),
            operation=mpmd.Concat(),
        )

    (loop,) = assert_like_jit(mesh, step, weights(4), X).plan.loops
    assert len(loop.ends) == 1


def test_fewer_layers_than_stages():
    step = trained(loss_of, mpmd.Std1F1B(4))
    with pytest.raises(ValueError, match=r"num_stages=4 needs as many layers .* found 2 in loss_of"):
        planned(step, weights(2), X, Y, groups=4)


def test_a_loop_that_differentiates_by_itself_says_what_does_it():
    step = sgd_step(loss_of, mpmd.Std1F1B(2))
    with pytest.raises(mpmd.CompileError, match=r"mpmd\.auto_marks\(loss_fn, num_stages=2\)"):
        planned(step, weights(4), *batch())


def test_one_stage_needs_no_cut():
    lowered = planned(trained(loss_of, mpmd.Std1F1B(1)), weights(1), X, Y, groups=1)
    assert lowered.plan.loops[0].ends == ()
