"""Plans of steps whose loss is a loop over slices: schedules of slices are candidates beside the others."""

import dataclasses

import jax
import pytest

import mpmd
from mpmd.planner.candidate import Candidate
from mpmd.planner.choice_table import row_data
from mpmd.planner.cluster import Cluster
from mpmd.planner.constraints import Constraints
from mpmd.planner.profiling.tracing import traced_layers
from mpmd.planner.reasons import complexity
from mpmd.planner.search.closed_forms import CLOSED_FORMS, closed_form
from mpmd.planner.search.families import SLICED, build, family_of
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.search import search
from mpmd.planner.search.stages import CostModel
from mpmd.planner.trials.trials import StepSpec, Trials
from mpmd.simulate import Link
from tests.support.models import descend
from tests.support.parity import assert_close
from tests.support.planned_steps import CLUSTER
from tests.support.profiles import layer, profile
from tests.support.programs.sliced_models import (
    LENGTH,
    decoder,
    feed_forward,
    position_by_position,
    sliced_loss,
    token_batch,
)

STAGES, SLICES = 2, 2
FAST = Cluster(1, 8, 1e12, 1e12, 1e15, Link(0, 1e18), Link(0, 1e18))


def step_of(schedule, slices=SLICES, loss=None):
    """A step of the decoder, whose loss is a loop over slices."""
    loss = loss or sliced_loss(slices=slices, stages=STAGES)

    def step(params, tokens, targets):
        def of_microbatch(microbatch):
            return jax.value_and_grad(loss)(params, *microbatch)

        total, grads = mpmd.treduce(of_microbatch, (tokens, targets), schedule, operation=mpmd.Mean)
        return descend(params, grads), total

    return step


def sliced_arguments():
    return decoder(STAGES), *token_batch(2)


def planned(written, **constraints):
    step = step_of(written, loss=sliced_loss(position_by_position, slices=SLICES, stages=STAGES))
    return mpmd.plan(step, *sliced_arguments(), cluster=CLUSTER, simulate=2, **constraints)


@pytest.fixture(scope="module")
def choice():
    """The choice for a step whose own schedule has no slices, on two groups of a device each."""
    return planned(mpmd.Std1F1B(STAGES), groups=STAGES, submesh={})


def test_slices_are_chosen_for_a_loss_that_is_written_with_them(choice):
    schedules = [row.candidate.schedule for row in choice.rows]
    assert {schedule.slices for schedule in schedules} == {1, SLICES}
    assert choice.candidate.schedule.slices == SLICES
    assert choice.best.prediction.source == "simulation"
    written = next(row for row in choice.rows if row.label == "as written")
    assert written.candidate.schedule == mpmd.Std1F1B(STAGES) and "bubble" in written.reason
    assert choice.best.prediction.bubble < written.prediction.bubble
    assert choice.best.prediction.memory.total < written.prediction.memory.total


def test_the_choice_says_its_slices(choice):
    assert f"Seq1F1B of {SLICES} slices" in str(choice)
    assert row_data(choice.best, choice.examples)["candidate"]["slices"] == SLICES
    assert len(choice.best.prediction.stage_seconds) == STAGES
    assert len(choice.stage_profile().chosen) == STAGES


@pytest.mark.slow
def test_the_choice_computes_what_plain_jax_computes(choice):
    args = sliced_arguments()
    with choice.mesh() as mesh:
        step = choice.jit(mesh, donate_argnums=())
        loss = sliced_loss(position_by_position, slices=SLICES, stages=STAGES)
        assert_close(step(*args), jax.jit(step_of(mpmd.Std1F1B(STAGES), loss=loss))(*args))


@pytest.mark.parametrize("schedule", ["Seq1F1B", mpmd.GPipe(STAGES, SLICES), mpmd.Seq1F1B(STAGES, SLICES)])
def test_a_schedule_of_slices_may_be_fixed(schedule):
    made = dataclasses.replace(profile((layer("", 1e12),) * STAGES, 4), slices=SLICES)
    schedules = {
        row.candidate.schedule for row in search(made, FAST, Constraints(groups=STAGES, schedule=schedule))
    }
    assert {one.slices for one in schedules} == {SLICES}
    assert schedules == {schedule} or {type(one) for one in schedules} == {mpmd.Seq1F1B}


@pytest.mark.parametrize(
    ("slices", "schedule", "message"),
    [
        (1, "Seq1F1B", r"Seq1F1B is for a loss that is a loop over slices .*mpmd.slices"),
        (3, mpmd.Seq1F1B(2, 2), r"has 2 slices, and the step's loss is a loop over 3"),
    ],
)
def test_slices_that_the_loss_does_not_have_are_refused(slices, schedule, message):
    made = dataclasses.replace(profile((layer("", 1e12),) * 2, 4), slices=slices)
    with pytest.raises(ValueError, match=message):
        search(made, FAST, Constraints(schedule=schedule))


@pytest.mark.slow
def test_slices_are_those_of_marks_that_stand_in_each():
    def stages(schedule, **loss):
        (loop,) = traced_layers(step_of(schedule, **loss), sliced_arguments(), {}).written.values()
        return loop.stages.count, loop.stages.slices

    def scores_in_slices(params, tokens, targets):
        """A loss of whole microbatches, of which the last stage alone is cut."""
        h = params["embed"][tokens]
        h = mpmd.mark_stage_end(feed_forward(params["layers"][0], h))
        bounds = mpmd.slice_bounds(LENGTH, SLICES)
        return sum((part @ params["head"]).sum() for part in mpmd.slices(h, bounds))

    assert stages(mpmd.Seq1F1B(STAGES, SLICES)) == (STAGES, SLICES)
    assert stages(None, slices=3) == (STAGES, 3)
    assert stages(mpmd.Std1F1B(STAGES), loss=scores_in_slices) == (STAGES, 1)


@pytest.mark.parametrize("name", SLICED)
def test_families_are_those_of_their_schedules(name):
    schedule = build(name, 4, 4, 2)
    assert family_of(schedule) == name and schedule.slices == 2
    of_slices = complexity(Candidate((1,) * 4, ({},) * 4, schedule, 2, False, False))
    assert of_slices.pipeline and of_slices.unusual_schedule and sum(of_slices) == 2
    assert family_of(mpmd.GPipe(4)) == "GPipe" and closed_form("GPipe", 2) is CLOSED_FORMS["GPipe"]


def of_equal_stages(schedule, number=4, cluster=FAST, **of_layer):
    parts = [layer("", 1e12, **of_layer) for _ in range(schedule.num_stages)]
    made = dataclasses.replace(profile(tuple(parts), number), slices=schedule.slices)
    return evaluate(
        CostModel(made, cluster),
        Candidate((1,) * len(parts), ({},) * schedule.mpmd_dim, schedule, number, False, False),
    ).prediction


def test_slices_pay_latencies_overheads_and_weights_again():
    slow = dataclasses.replace(FAST, device_link=Link(0.1, 1e18))
    plain, eager = (of_equal_stages(mpmd.Seq1F1B(4, 8, eager=eager), 16, slow) for eager in (False, True))
    assert eager.seconds < plain.seconds
    assert plain.seconds > of_equal_stages(mpmd.Seq1F1B(4, 8), 16).seconds + 2
    busy = dataclasses.replace(FAST, task_overhead=0.5)
    assert (
        of_equal_stages(mpmd.Seq1F1B(4, 4), 8, busy).seconds
        > of_equal_stages(mpmd.Std1F1B(4), 8, busy).seconds
    )
    bound = dataclasses.replace(FAST, memory_bandwidth=1e3)
    schedules = mpmd.Std1F1B(1), mpmd.Seq1F1B(1, 4)
    once, often = (of_equal_stages(one, 4, bound, weights=4000).seconds for one in schedules)
    assert often > 2 * once


@pytest.mark.parametrize("exhaustive", [True, False])
def test_a_search_finds_slices_where_memory_is_short(exhaustive):
    parts = [layer("", 1e12, residuals=1000) for _ in range(4)]
    made = dataclasses.replace(profile(tuple(parts), 4), slices=4, are_stages=True, num_microbatches=4)
    short = dataclasses.replace(FAST, memory=2500)
    best = search(made, short, Constraints(groups=4, submesh={}), exhaustive)[0]
    assert best.candidate.schedule.slices == 4 and best.prediction.memory.total <= 2500


@pytest.mark.slow
def test_the_formula_is_near_the_simulation_of_the_plan():
    step = step_of(mpmd.Std1F1B(STAGES), loss=sliced_loss(position_by_position, bounds=(0, 6, 12)))
    made = Trials(StepSpec.of(step, sliced_arguments()), CLUSTER)
    for schedule in (mpmd.Std1F1B(STAGES), mpmd.Seq1F1B(STAGES, SLICES)):
        candidate = Candidate((1,) * STAGES, ({},) * STAGES, schedule, 2, False, False)
        formula = evaluate(CostModel(made.profiles[0], CLUSTER), candidate).prediction
        simulated = made.realize(candidate).prediction
        assert formula.seconds == pytest.approx(simulated.seconds, rel=0.1)
        assert formula.bubble == pytest.approx(simulated.bubble, abs=0.05)
