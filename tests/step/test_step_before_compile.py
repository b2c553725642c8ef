"""Attributes of compiled steps that are asked of a function which was compiled once, twice, or not yet."""

import jax
import pytest

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of


@pytest.fixture
def step():
    with mesh_of(2) as mesh:
        yield mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh)


@pytest.mark.parametrize("name", ["report", "plan", "restore", "init", "simulate", "argument_leaves"])
def test_before_the_first_compile_the_error_says_what_to_do(step, name):
    with pytest.raises(
        AttributeError, match=rf"no arguments yet: step = step\.compile\(\*args\) has step\.{name}"
    ):
        getattr(step, name)


def test_an_unknown_attribute_is_pythons_own_error(step):
    with pytest.raises(AttributeError, match="'MpmdFunction' object has no attribute 'repotr'"):
        step.repotr  # noqa: B018


def test_what_was_compiled_once_is_that_of_the_function(step):
    loaded = step.compile(init(weights(2)), *batch())
    assert step.plan is loaded.plan
    assert str(step.report()) == str(loaded.report())


def test_what_was_compiled_twice_is_ambiguous(step):
    step.compile(init(weights(2)), *batch())
    step.compile(init(weights(2)), *(jax.numpy.concatenate([x, x], 1) for x in batch()))
    with pytest.raises(AttributeError, match="compiled for 2 kinds of arguments"):
        step.report()


def test_a_profile_compiles_as_a_call_does(step):
    (_, (loss, _)), events = step.profile(init(weights(2)), *batch())
    assert {event.mpmd_idx for event in events} == {0, 1}
    assert float(loss) == float(step(init(weights(2)), *batch())[1][0])
