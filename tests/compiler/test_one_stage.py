"""A loop of one stage, which has no marks, is the work of that stage."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.ir.plan import Cell
from tests.support.models import planned, sgd_step

VALUES = jax.ShapeDtypeStruct((4, 2, 8), "float32")
WEIGHT = jax.ShapeDtypeStruct((8, 8), "float32")


def train_step(schedule):
    def loss(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    return sgd_step(loss, schedule)


def cells(step, *args):
    """The tasks of the loop, and the equations of what is outside."""
    lowered = planned(step, *args, groups=1)
    [program] = lowered.plan.programs
    outside = [
        eqn
        for (_, task), jaxpr in lowered.compiled.program.jaxprs.items()
        for eqn in jaxpr.eqns
        if not isinstance(task, Cell)
    ]
    return [str(run.task) for run in program.runs if isinstance(run.task, Cell)], outside


@pytest.mark.parametrize("schedule", [mpmd.Std1F1B(1), mpmd.GPipe(1)], ids=repr)
def test_its_tasks_are_those_of_the_schedule(schedule):
    tasks, outside = cells(train_step(schedule), WEIGHT, VALUES)
    assert tasks == [str(cell) for cell in schedule.tasks(4)[0]]
    assert not [eqn for eqn in outside if eqn.primitive.name in ("scan", "dot_general")]


def test_forwards_alone():
    def step(w, xs):
        return mpmd.treduce(lambda x: x @ w, xs, mpmd.ForwardOnly(1, 1), operation=mpmd.Concat())

    assert cells(step, WEIGHT, VALUES)[0] == [f"fwd_0__{i}" for i in range(4)]
