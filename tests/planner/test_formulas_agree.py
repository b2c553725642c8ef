"""The formulas against the simulation of the plans that their candidates become."""

import dataclasses

import jax
import pytest

import mpmd
from mpmd.planner.candidate import Candidate
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.stages import CostModel
from mpmd.planner.trials.trials import StepSpec, Trials
from tests.support.planned_steps import ADAM, CLUSTER, LAYERS, open_step
from tests.support.transformer_step import shapes, train_step

WIDTH, ROWS = 64, 512
SUBMESHES = {"one device": {}, "data": {"data": 2}, "model": {"model": 2}}
FAST = dataclasses.replace(CLUSTER, flops=2e10)
CLUSTERS = {
    "products are bound by operations": CLUSTER,
    "by memory": FAST,
    "with shared cores": dataclasses.replace(FAST, alone=4.0),
    "products accumulate": dataclasses.replace(FAST, accumulates_products=True),
}


@pytest.fixture(scope="module", params=CLUSTERS.values(), ids=CLUSTERS)
def trials(request):
    """A perceptron with a hidden layer in each of four blocks, whose stages and microbatches are open."""
    up, bias, down = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH,), (2 * WIDTH, WIDTH))
    )
    params = [{"up": up, "bias": bias, "down": down} for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    args = (params, jax.eval_shape(ADAM.init, params), x, x)
    return Trials(StepSpec.of(open_step, args), request.param), request.param


@pytest.mark.usual(
    "products are bound by operations-4-model-4",
)
@pytest.mark.parametrize("num_microbatches", [4, 16])
@pytest.mark.parametrize("submesh", SUBMESHES.values(), ids=SUBMESHES)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_formula_is_near_the_simulation_of_the_plan(trials, groups, submesh, num_microbatches):
    made, cluster = trials
    candidate = Candidate(
        layers_per_stage=(LAYERS // groups,) * groups,
        submeshes=(submesh,) * groups,
        schedule=mpmd.Std1F1B(groups),
        num_microbatches=num_microbatches,
        remat=False,
        fsdp=False,
    )
    formula = evaluate(CostModel(made.profiles[0], cluster), candidate).prediction
    simulated = made.realize(candidate).prediction
    assert formula.seconds == pytest.approx(simulated.seconds, rel=0.1)
    assert formula.bubble == pytest.approx(simulated.bubble, abs=0.05)


@pytest.mark.usual("{'data': 2}")
@pytest.mark.parametrize("submesh", [{}, {"data": 2}], ids=str)
def test_the_formula_knows_the_temporaries_of_a_large_vocabulary(submesh):
    made = Trials(StepSpec.of(train_step, shapes(rows=32, vocabulary=4096)), CLUSTER)
    number = len(made.profiles[0].layers)
    candidate = Candidate((number,), (submesh,), mpmd.Std1F1B(1), 2, remat=False, fsdp=False)
    formula = evaluate(CostModel(made.profiles[0], CLUSTER), candidate).prediction.memory
    simulated = made.realize(candidate).prediction.memory
    assert formula.temporaries > formula.weights / 2
    assert formula.temporaries == pytest.approx(simulated.temporaries, rel=0.3)
