"""Attributes of compiled steps that are asked of a function which was compiled once, twice, or not yet."""

import jax
import pytest

import mpmd
from tests.support.models import batch, shrink, weights


@pytest.fixture
def step(mesh):
    return mpmd.jit(shrink, mesh)


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
    loaded = step.compile(weights(2), *batch())
    assert step.plan is loaded.plan
    assert str(step.report()) == str(loaded.report())


def test_what_was_compiled_twice_is_ambiguous(step):
    step.compile(weights(2), *batch())
    step.compile(weights(2), *(jax.numpy.concatenate([x, x], 1) for x in batch()))
    with pytest.raises(AttributeError, match="compiled for 2 kinds of arguments"):
        step.report()


def test_a_profile_compiles_as_a_call_does(step):
    (_, loss), events = step.profile(weights(2), *batch())
    assert {event.mpmd_idx for event in events} == {0, 1}
    assert float(loss) == float(step(weights(2), *batch())[1])


def test_jaxpp_names_are_aliases():
    assert mpmd.mpmd_jit_with_loop is mpmd.jit
    assert mpmd.pipeline_enter_stage is mpmd.mark_pipeline_boundary is mpmd.mark_stage_end
