"""Sequence parallelism: values between tensor-parallel regions are divided along ``model``, too."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate
from mpmd.planner.choice_table import candidate_text, row_data
from mpmd.planner.constraints import Constraints
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.search import search
from mpmd.planner.search.stages import CostModel
from mpmd.planner.trials.trials import StepSpec, Trials
from mpmd.simulate import Link
from tests.support import planned_steps
from tests.support.parity import assert_close
from tests.support.transformer_step import (
    arguments,
    scanned_step,
    shapes,
    stacked_arguments,
    train_step,
)

CLUSTER = mpmd.Cluster(
    nodes=1,
    devices_per_node=8,
    memory=1e9,
    flops=1e13,
    memory_bandwidth=1e10,
    device_link=Link(1e-7, 1e11),
)
"""Devices that are slow to read their memory."""


def chosen(step, args, **fixes):
    return mpmd.plan(step, *args, cluster=CLUSTER, simulate=1, **fixes)


CASES = {
    "rows, too": ({"groups": 2, "submesh": {"data": 2, "model": 2}}, train_step, arguments),
    "weights, too": (
        {"groups": 1, "submesh": {"data": 2, "model": 2}, "fsdp": True},
        train_step,
        arguments,
    ),
    "layers of a scan": ({"groups": 2, "submesh": {"model": 2}}, scanned_step, stacked_arguments),
    "groups of two sizes": (
        {"groups": 2, "submesh": [{"model": 4}, {"model": 2}]},
        train_step,
        arguments,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_computes_what_plain_jax_computes(case):
    fixes, step, arguments_of = CASES[case]
    args = arguments_of()
    choice = chosen(step, args, **{"num_microbatches": 2, "remat": False, **fixes}, sequence_parallel=True)
    assert choice.candidate.sequence_parallel
    expected = jax.jit(step)(*args)
    with choice.mesh() as mesh:
        planned = choice.jit(mesh, donate_argnums=())
        assert_close(planned(*args), expected)
        executables = planned.compile(*args).collectives().values()
    exchanged = [collective for of_executable in executables for collective in of_executable]
    assert any(collective.operation == "all-gather" for collective in exchanged)


def test_a_step_of_rows_alone_is_divided_by_rows():
    args = planned_steps.arguments(num_layers=2)
    fixes = {"groups": 1, "submesh": {"model": 4}, "num_microbatches": 2, "remat": False}
    choice = chosen(planned_steps.open_step, args, **fixes, sequence_parallel=True)
    expected = jax.jit(planned_steps.open_step)(*args)
    with choice.mesh() as mesh:
        planned = choice.jit(mesh, donate_argnums=())
        assert_close(planned(*args), expected)


@pytest.fixture(scope="module")
def trials():
    spec = StepSpec.of(train_step, shapes(2, 128, 64, 16))
    return Trials(spec, CLUSTER)


@pytest.mark.usual("{'model': 4}-none")
@pytest.mark.parametrize("remat", [Remat.NONE, Remat.NOTHING_SAVEABLE])
@pytest.mark.parametrize("submesh", [{"model": 4}, {"data": 2, "model": 2}], ids=str)
def test_the_formula_is_near_the_simulation_of_the_plan(trials, submesh, remat):
    model = CostModel(trials.profiles[0], CLUSTER)
    predictions = {}
    for sequence_parallel in (False, True):
        number = len(trials.profiles[0].layers)
        candidate = Candidate(
            layers_per_stage=(number // 2, number - number // 2),
            submeshes=(submesh, submesh),
            schedule=mpmd.Std1F1B(2),
            num_microbatches=4,
            remat=(remat,),
            fsdp=False,
            sequence_parallel=sequence_parallel,
        )
        formula, plan = evaluate(model, candidate).prediction, trials.realize(candidate).prediction
        assert (
            0.6 < formula.seconds / plan.seconds < 1.1
        )  # the formula takes gathered values for divided ones
        assert formula.memory.residuals == pytest.approx(plan.memory.residuals, rel=0.2)
        predictions[sequence_parallel] = plan
    assert predictions[True].seconds < predictions[False].seconds
    assert predictions[True].memory.residuals < 0.9 * predictions[False].memory.residuals
    assert predictions[True].memory.messages < predictions[False].memory.messages


def best_row(trials, cluster=CLUSTER, **fixes):
    """The best by the formulas, on a group that divides layers."""
    constraints = Constraints.of(**{"groups": 1, "submesh": {"model": 4}, "remat": False, **fixes})
    return search(trials.profiles[0], cluster, constraints)[0]


def test_is_chosen_where_memory_limits_tasks(trials):
    row = best_row(trials)
    assert row.candidate.sequence_parallel and "sequence parallel" in candidate_text(row.candidate)
    assert row_data(row, 1)["candidate"]["sequence_parallel"] is True


def test_is_not_chosen_where_latencies_limit_tasks(trials):
    slow = dataclasses.replace(CLUSTER, device_link=Link(1e-3, 1e11))
    assert not best_row(trials, slow).candidate.sequence_parallel


@pytest.mark.slow
def test_constraints_of_the_user_stay():
    def loss(params, x, y):
        for layer in params:
            h = jax.lax.with_sharding_constraint(x, P("data", None))
            x = x + jax.numpy.tanh(h @ layer["up"] + layer["bias"]) @ layer["down"]
        return jax.numpy.mean((x - y) ** 2)

    def step(params, x, y):
        return mpmd.value_and_grad(loss)(params, x, y)

    args = planned_steps.params_of(2), *planned_steps.batch()
    fixes = {"groups": 1, "submesh": {"data": 2, "model": 2}, "num_microbatches": 2, "remat": False}
    choice = chosen(step, args, **fixes, sequence_parallel=True)
    expected = jax.value_and_grad(planned_steps.loss_of)(*args)
    with choice.mesh() as mesh:
        assert_close(choice.jit(mesh, donate_argnums=())(*args), expected)


REFUSED = {
    "nothing along model": ({"submesh": {"data": 4}}, "has one device"),
    "a length": ({"submesh": {"sequence": 32, "model": 4}}, "do not divide sequences of 64"),
    "not a choice": ({"sequence_parallel": "yes"}, "sequence_parallel must be"),
}


@pytest.mark.parametrize(("fixes", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_cannot_be_divided(trials, fixes, message):
    cluster = dataclasses.replace(CLUSTER, devices_per_node=512)
    with pytest.raises((TypeError, ValueError), match=message):
        best_row(trials, cluster, **{"sequence_parallel": True, **fixes})


def test_refuses_a_step_without_a_loop():
    step, args = planned_steps.step_without_a_loop, planned_steps.arguments()
    with pytest.raises(ValueError, match="it has no loop"):
        mpmd.plan(step, *args, cluster=CLUSTER, sequence_parallel=True)
