"""The metrics of steps, as a user's ``write`` gets them."""

import collections
import gc

import jax
import numpy as np
import pytest

import mpmd
import mpmd.errors
from mpmd.runtime import step_meter
from mpmd.runtime.requests import StepRequest
from mpmd.runtime.step_meter import StepEnd, StepMeter
from tests.support.asked import note_requests
from tests.support.models import batch, shrink, weights
from tests.support.parity import mesh_of

ON_CPU = {
    "step_seconds",
    "driver_seconds",
    "bytes_sent",
    "failed_steps",
    "recoveries",
    "recovery_seconds",
    "host_memory_bytes",
}


class Written(list):
    """A ``write`` that keeps what it gets."""

    def __call__(self, step, values):
        self.append((step, values))

    @property
    def steps(self):
        return [step for step, _ in self]


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


@pytest.fixture
def step(mesh):
    return mpmd.jit(shrink, mesh, donate_argnums=0)


def train(step, state, steps):
    for _ in range(steps):
        state, _ = step(state, *batch())
    return state


class MeshWithoutRecoveries:
    recovery_seconds = ()


MESH = MeshWithoutRecoveries()


def metrics_of(ends, **options):
    """What is written of steps that ended so."""
    meter, written = StepMeter("step", MESH), Written()
    step = collections.namedtuple("Step", "meter")(meter)
    with mpmd.metrics(step, written, **options) as metrics:
        for begun, ended, *failed in ends:
            metrics.add(StepEnd(metrics._since + begun, metrics._since + ended, bool(failed), 10))
            metrics.hand_over()
    return written


def test_every_step_is_written_with_its_number(step):
    written = Written()
    with mpmd.metrics(step, written, examples=16, tokens=64, first_step=100):
        train(step, weights(2), 5)
    assert written.steps == [100, 101, 102, 103, 104]
    for _, values in written:
        assert values.keys() == ON_CPU | {"examples_per_second", "tokens_per_second"}
        assert values["step_seconds"] > 0 and values["host_memory_bytes"] > 2**20
        assert values["examples_per_second"] == pytest.approx(16 / values["step_seconds"])
        assert values["tokens_per_second"] == pytest.approx(64 / values["step_seconds"])
        assert values["failed_steps"] == values["recoveries"] == 0


def test_bytes_are_those_that_the_plan_sends(step):
    written = Written()
    compiled = step.compile(weights(2), *batch())
    with mpmd.metrics(step, written):
        train(step, weights(2), 2)
    sent = sum(edge.nbytes for edge in mpmd.explain(compiled).edges)
    assert sent > 0
    assert [values["bytes_sent"] for _, values in written] == [sent, sent]


def test_seconds_go_from_end_to_end_however_many_steps_are_under_way():
    written = metrics_of([(0, 1), (0.25, 3), (0.5, 4), (6, 7)])
    assert [values["step_seconds"] for _, values in written] == pytest.approx([1, 2, 1, 3])
    assert [values["driver_seconds"] for _, values in written] == pytest.approx([0, 0, 0, 2], abs=1e-6)


def test_several_steps_are_written_as_their_mean_and_the_rest_at_the_end():
    written = metrics_of([(0, 1), (0, 3), (5, 6), (6, 7)], every=3, examples=10)
    assert written.steps == [2, 3]
    (_, first), (_, last) = written
    assert first["step_seconds"] == pytest.approx(2) and last["step_seconds"] == pytest.approx(1)
    assert first["driver_seconds"] == pytest.approx(2 / 3) and first["bytes_sent"] == 10
    assert first["examples_per_second"] == pytest.approx(5)


def test_the_time_of_a_failed_step_counts_to_the_next_one_which_gets_its_number():
    written = metrics_of([(0, 1), (1, 2, "failed"), (2, 4)])
    assert written.steps == [0, 1]
    assert [values["step_seconds"] for _, values in written] == pytest.approx([1, 3])
    assert [values["driver_seconds"] for _, values in written] == pytest.approx([0, 0], abs=1e-6)
    assert [values["failed_steps"] for _, values in written] == [0, 1]


def test_steps_outside_of_the_context_and_other_functions_do_not_count(mesh, step):
    written = Written()
    other = mpmd.jit(lambda state: jax.tree.map(lambda leaf: leaf * 1, state), mesh)
    state = train(step, weights(2), 2)
    with mpmd.metrics(step, written):
        state = train(step, state, 1)
        other(state)
    train(step, state, 1)
    assert written.steps == [0]


def test_a_compiled_step_counts_with_its_function_and_a_lowered_one_by_itself(step):
    of_function, of_compiled, of_lowered = Written(), Written(), Written()
    arguments = (weights(2), *batch())
    compiled, lowered = step.compile(*arguments), step.lower(*arguments).compile()
    with (
        mpmd.metrics(step, of_function),
        mpmd.metrics(compiled, of_compiled),
        mpmd.metrics(lowered, of_lowered),
    ):
        state, _ = compiled(*arguments)
        train(lowered, state, 2)
    assert (of_function.steps, of_compiled.steps, of_lowered.steps) == ([0], [0], [0, 1])


def test_groups_are_asked_for_memory_in_a_step_of_each_second(mesh, step, monkeypatch):
    monkeypatch.setattr(step_meter, "MEMORY_SECONDS", 1000.0)
    noted = note_requests(monkeypatch, mesh.runtime)
    train(step, weights(2), 3)
    requests = [each for asked in noted for each in asked.values() if isinstance(each, StepRequest)]
    assert [request.measure_memory for request in requests] == [True, True] + [False] * 4


def failing(times):
    """A ``write`` that fails so often, and then keeps what it gets."""
    written = Written()

    def write(number, values):
        if len(written) + len(raised) < times:
            raised.append(number)
            raise OSError("the disk is full")
        written(number, values)

    raised = []
    return write, written


def test_what_write_raises_is_raised_by_the_next_call_before_that_runs(step):
    write, written = failing(times=1)
    with mpmd.metrics(step, write):
        states = [weights(2)]
        with pytest.raises(OSError, match="the disk is full") as caught:
            while True:
                states.append(step(states[-1], *batch())[0])
                jax.block_until_ready(states[-1])
        done = len(states) - 1
        assert "`write` has failed for the metrics of step 0" in caught.value.__notes__[0]
        train(step, states[-1], 3)  # the call that raised has taken nothing over
    assert written.steps == list(range(1, done + 3))


def test_what_write_raises_at_the_end_is_raised_there(step):
    write, _ = failing(times=1)
    with pytest.raises(OSError, match="the disk is full"), mpmd.metrics(step, write):
        state, _ = step(weights(2), *batch())
    train(step, state, 1)


def test_an_error_of_the_loop_goes_before_that_of_write(step):
    write, _ = failing(times=1)
    with pytest.raises(ZeroDivisionError) as caught, mpmd.metrics(step, write):
        train(step, weights(2), 1)
        step.meter.wait()
        1 / 0  # noqa: B018
    assert "`write` has failed, too: OSError: the disk is full" in caught.value.__notes__[0]


def test_an_interrupt_of_write_leaves_the_new_state(step):
    def write(number, values):
        raise KeyboardInterrupt

    metrics = mpmd.metrics(step, write)
    state = train(step, weights(2), 1)
    step.meter.wait()
    with pytest.raises(KeyboardInterrupt):
        step(state, *batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    metrics._meter.remove_listener(metrics)
    train(step, state, 1)


def test_write_may_call_the_step(mesh):
    step, written, state = mpmd.jit(shrink, mesh), Written(), weights(2)

    def write(number, values):
        written(number, values)
        if number == 0:
            jax.block_until_ready(train(step, state, 2))

    with mpmd.metrics(step, write):
        train(step, state, 1)
        step.meter.wait()
        train(step, state, 1)
    assert written.steps == [0, 1, 2, 3]


def test_failed_steps_are_counted(mesh):
    step, written = mpmd.jit(shrink, mesh), Written()
    state, (xs, ys) = weights(2), batch()
    with mpmd.metrics(step, written):
        train(step, state, 1)
        xs = np.full_like(xs, np.nan)
        with jax.debug_nans(True):
            failed, _ = step(state, xs, ys)
        with pytest.raises(mpmd.TaskError):
            jax.block_until_ready(failed)
        train(step, state, 1)
    assert [(number, values["failed_steps"]) for number, values in written] == [(0, 0), (1, 1)]


def test_closing_twice_writes_once(step):
    written = Written()
    metrics = mpmd.metrics(step, written)
    train(step, weights(2), 2)
    metrics.close()
    metrics.close()
    assert written.steps == [0, 1]


def test_all_that_is_wrong_with_arguments_is_said_at_once():
    with pytest.raises(TypeError) as caught:
        mpmd.metrics(shrink, lambda values: None, examples=0, tokens="512", every=0, first_step=-1)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("mpmd.metrics: step must be the result of mpmd.jit, or a compiled step")
    assert lines[1].startswith("write must take two arguments, the number of a step and a dict")
    assert [line.split()[0] for line in lines[2:]] == ["examples", "tokens", "every", "first_step"]


def test_the_counts_of_a_function(mesh, step):
    jax.block_until_ready(train(step, weights(2), 3))
    step.meter.wait()
    meter, totals = step.meter, step.meter.totals
    assert (meter.name, totals.ended, totals.failed, meter.under_way) == ("shrink", 3, 0, 0)
    assert meter.seconds_per_step > 0 and totals.driver_seconds >= 0 and meter.last_end > 0
    assert meter.memory.keys() == {0, 1}
    assert step.meter in mesh.runtime.meters.all()


def test_the_meter_of_a_function_that_is_dropped_is_dropped(mesh):
    gc.collect()  # functions of earlier tests
    number = len(mesh.runtime.meters.all())
    other = mpmd.jit(lambda x: x + 1, mesh)
    np.asarray(other(np.ones(2)))
    assert len(mesh.runtime.meters.all()) == number + 1
    del other
    other = mpmd.jit(lambda x: x + 2, mesh)
    np.asarray(other(np.ones(2)))
    assert len(mesh.runtime.meters.all()) == number + 1
