"""Steps whose microbatches are cut into slices: results, accumulators, residuals, and what is refused."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import CompileError
from mpmd.ir.plan import Run, Task
from mpmd.runtime.nonfinite import passed_on
from mpmd.schedules import Schedule
from mpmd.simulate import simulate
from tests.support.models import planned, sgd_step
from tests.support.parity import assert_like_jit, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

STAGES, SLICES, LENGTH, WIDTH, MICROBATCHES = 3, 2, 6, 16, 3
BOUNDS = (0, 4, 6)


def problem(stages=STAGES):
    keys = jax.random.split(jax.random.key(0), stages + 1)
    weights = [jax.random.normal(key, (2, WIDTH, WIDTH)) / 4 for key in keys[:-1]]
    return weights, jax.random.normal(keys[-1], (MICROBATCHES, 2, LENGTH, WIDTH))


def layer(w, x, chunks):
    """Mixes a slice with the prefix that ends with it; ``chunks`` has what each slice hands on."""
    chunks.append(x @ w[0])
    prefix = jnp.concatenate(chunks, axis=1)
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, prefix))
    return x + jnp.tanh(jnp.einsum("bqk,bkd->bqd", scores, prefix) @ w[1])


def sliced(weights, x, bounds=BOUNDS, mark=mpmd.mark_stage_end, last=lambda h: h):
    """The sum of the losses of slices, as a user writes it."""
    chunks, total = [[] for _ in weights], 0.0
    for start, stop in itertools.pairwise(bounds):
        h = x[:, start:stop]
        for i, w in enumerate(weights):
            h = layer(w, h, chunks[i])
            if i + 1 < len(weights):
                h = mark(h)
        total += (last(h) ** 2).sum()
    return total


def assert_right(loss, schedule, args=None):
    """Returns the step on groups, after its results were compared with plain JAX."""
    args = args or problem()
    with mesh_of(schedule.mpmd_dim) as mesh:
        return assert_like_jit(mesh, sgd_step(loss, schedule), *args)


@pytest.fixture(scope="module")
def step():
    """Returns a step that was compared with plain JAX; its loss also marks the end of the last stage."""
    loss = functools.partial(sliced, last=mpmd.mark_stage_end)
    return assert_right(loss, mpmd.Seq1F1B(STAGES, SLICES))


def refused(loss, schedule, args=None):
    with pytest.raises(CompileError) as caught:
        planned(sgd_step(loss, schedule), *(args or problem()), groups=schedule.mpmd_dim)
    return re.sub(r"\S*\.py:\d+", "LINE", str(caught.value))


def test_a_weight_has_one_accumulator(step):
    plan = step.plan
    weight = 2 * WIDTH * WIDTH * 4
    for group, program in enumerate(plan.programs):
        zeros = [run for run in program.runs if str(run.task).startswith("before")]
        sizes = [plan.avals()[name].nbytes for run in zeros for name in run.outputs]
        assert sizes.count(weight) == 1
        assert step.report().groups[group].memory.peak.accumulators >= weight


def test_stages_are_named_with_their_slice(step):
    plan = step.plan
    assert plan.stage_text(4) == "stage 1, slice 1"
    run = next(run for run in plan.programs[1].runs if isinstance(run, Run) and run.label == "bwd_4__0")
    assert plan.task_text(run.task) == "bwd_4__0 (stage 1, slice 1)"
    assert "Seq1F1B: stages 0 to 5 of 3 on 2 slices, 3 microbatches" in plan.shown()
    assert re.search(r"bwd_\d__\d \(stage 0, slice \d\)", str(step.report()))
    reasons = " ".join(gap.reason for gap in simulate(plan).gaps)
    assert re.search(r"waits for .*bwd_4__\d \(stage 1, slice 1\) of group 1", reasons)
    texts = passed_on(plan, plan.programs[1]).values()
    assert any(re.search(r"which fwd_4__0 \(stage 1, slice 1\) reads$", text) for text in texts)
    explained = str(mpmd.explain(step))
    assert "fwd_3 (stage 0, slice 1)" in explained and "shared weight" not in explained


def test_an_expensive_value_of_a_weight_that_all_slices_and_two_stages_read():
    def loss(weights, x):
        normal = weights[0] / jnp.linalg.norm(weights[0])
        return sliced([normal, weights[1], normal], x)

    weights, xs = problem()
    assert_right(loss, mpmd.Seq1F1B(STAGES, SLICES), (weights[:2], xs))


def test_stages_of_several_loops_are_named_with_loop_and_slice():
    def step(weights, xs):
        weights, _ = sgd_step(sliced, mpmd.Seq1F1B(2, SLICES))(weights, xs)
        return sgd_step(sliced, mpmd.Seq1F1B(2, SLICES, eager=True))(weights, xs)

    assert planned(step, *problem(2)).plan.stage_text(7) == "stage 1 of loop 1, slice 1"


def test_marks_on_one_slice_are_refused():
    said = refused(lambda w, x: sliced(w, x, (0, LENGTH)), mpmd.Seq1F1B(STAGES, SLICES))
    assert "has 3 stages on 2 slices: it needs 4 marks, 2 in each slice, on one slice" in said
    assert "write the loss as a Python loop over the slices" in said
    assert "Std1F1B(num_stages=3)" in said


def test_another_number_of_slices_is_refused():
    said = refused(sliced, mpmd.Seq1F1B(STAGES, 4))
    assert "on 2 slices: give the loop over slices and the schedule the same number" in said


def test_a_loss_without_marks_is_refused():
    said = refused(lambda w, x: sliced(w, x, mark=lambda h: h), mpmd.Seq1F1B(STAGES, SLICES))
    assert "2 in each slice. Write the loss as a Python loop over the slices, and call mark_stage_end" in said
    assert "no call of mark_stage_end" in said


def test_stages_that_auto_marks_chooses_are_refused():
    loss = mpmd.auto_marks(lambda w, x: sliced(w, x, mark=lambda h: h), num_stages=STAGES)
    said = refused(loss, mpmd.Seq1F1B(STAGES, SLICES))
    assert "auto_marks and value_and_grad choose stages of whole microbatches alone" in said
    assert "Std1F1B(num_stages=3)" in said


def test_a_model_of_fewer_stages_is_refused():
    weights, xs = problem(2)
    said = refused(sliced, mpmd.Seq1F1B(4, SLICES, 2), (weights, xs))
    assert "They end 1 of them in each slice: mark 2 more, or use a schedule with num_stages=2" in said


def test_marks_of_each_value_of_a_stage_are_refused():
    def mark(h):
        a, b = jnp.split(h, 2, axis=-1)
        return jnp.concatenate([mpmd.mark_stage_end(a), mpmd.mark_stage_end(b)], axis=-1)

    said = refused(lambda w, x: sliced(w, x, mark=mark), mpmd.Seq1F1B(STAGES, SLICES))
    assert "mark them together, as mark_stage_end((x, y))" in said


def test_slices_of_one_stage_are_refused():
    said = refused(lambda w, x: sliced(w[:1], x), mpmd.Seq1F1B(1, SLICES))
    assert "slices need a model of several stages" in said


@pytest.mark.parametrize(
    ("make", "read", "kind"),
    [
        (lambda h, total: h[:, -1:], 0, r"float32\[2,1,16\]"),
        (lambda h, total: total, 0, r"float32\[\]"),
        (lambda h, total: h[:, -1:], 1, r"float32\[2,1,16\]"),
    ],
    ids=["last layer", "loss so far", "to the second stage"],
)
def test_a_value_from_the_last_stage_to_the_next_slice_is_refused(make, read, kind):
    def loss(weights, x):
        total, past, chunks = 0.0, 0.0, [[] for _ in weights]
        for start, stop in itertools.pairwise(BOUNDS):
            h = x[:, start:stop]
            for i, w in enumerate(weights):
                h = layer(w, h + past if i == read else h, chunks[i])
                if i + 1 < len(weights):
                    h = mpmd.mark_stage_end(h)
            total += (h**2).sum()
            past = make(h, total)
        return total

    said = refused(loss, mpmd.Seq1F1B(STAGES, SLICES))
    target = "the first stage" if read == 0 else "stage 1"
    assert f"runs from the last stage of one slice to {target} of the next" in said
    assert re.search(rf"slice 0 makes {kind} at LINE .*, and slice 1 reads it at LINE", said)
    assert "Each slice would wait for the whole pipeline: hand it to the same layer" in said


def test_a_scan_over_slices_that_carries_states_is_refused():
    def loss(weights, x):
        def one(state, piece):
            h = mpmd.mark_stage_end(jnp.tanh(piece @ weights[0][0]) + state[:, None])
            return state + piece.mean(1), (h**2).sum()

        state = jnp.zeros((2, WIDTH))
        return lax.scan(one, state, jnp.stack(jnp.split(x, 2, axis=1)))[1].sum()

    said = refused(loss, mpmd.Seq1F1B(2, SLICES))
    assert "write it as a Python loop over slices" in said


def test_a_carry_that_each_slice_updates_is_refused():
    def step(weights, xs):
        def body(seen, x):
            total, chunks = 0.0, [[] for _ in weights]
            for start, stop in itertools.pairwise(BOUNDS):
                h = x[:, start:stop]
                for i, w in enumerate(weights):
                    h = layer(w, h, chunks[i])
                    if i == 0:
                        h = h * seen
                        seen = 0.9 * seen + 0.1 * h.std()
                    if i + 1 < len(weights):
                        h = mpmd.mark_stage_end(h)
                total += (h**2).sum()
            return seen, total

        schedule, seen = mpmd.Seq1F1B(STAGES, SLICES), jnp.float32(1.0)
        return mpmd.treduce(body, xs, schedule, operation=mpmd.Add, carry=seen)

    said = (
        "(?s)in stage 0, slice 0, a value that treduce carries.*from slice to slice, in the loop over slices"
    )
    with pytest.raises(CompileError, match=said):
        planned(step, *problem(), groups=STAGES)


@dataclasses.dataclass(frozen=True)
class BySlice(Schedule):
    """A group's forwards by slice, and its backwards by slice."""

    slices: int = SLICES

    def tasks(self, num_microbatches):
        def of(kind, slice_index):
            stages = [slice_index * self.num_stages + stage for stage in range(self.num_stages)]
            return [[Task(kind, n, m) for m in range(num_microbatches)] for n in stages]

        orders = [of("fwd", 0), of("fwd", 1), of("bwd", 1), of("bwd", 0)]
        return [[task for lists in orders for task in lists[stage]] for stage in range(self.num_stages)]


def test_an_order_that_adds_up_slices_otherwise_is_refused():
    said = refused(sliced, BySlice(STAGES, STAGES))
    assert "runs fwd_2__2s0 before fwd_2__0s1" in said or "runs bwd_0__2s1 before bwd_0__0s0" in said
    assert "adds up its slices by microbatch" in said


def test_partial_sums_of_all_slices():
    schedule = mpmd.Seq1F1B(2, SLICES)
    weights, xs = problem(2)
    specs = (P(), P(None, "data"))
    step = sgd_step(sliced, schedule)
    with mesh_of(2, data=2) as mesh:
        loaded = assert_like_jit(mesh, step, weights, xs, in_specs=specs)
    accumulators = {aval.shape for name, aval in loaded.plan.avals().items() if ".state" in name}
    assert (2, 2, WIDTH, WIDTH) in accumulators


@jax.custom_vjp
def bounded(w):
    return w


bounded.defvjp(lambda w: (w, None), lambda _, gradient: (jnp.tanh(gradient),))


@pytest.mark.usual("1")
@pytest.mark.parametrize("bounded_slice", range(SLICES))
def test_slices_of_which_one_cannot_make_partial_sums(bounded_slice):
    def loss(weights, x):
        chunks, total = [], 0.0
        for k, (start, stop) in enumerate(itertools.pairwise(BOUNDS)):
            first = bounded(weights[0]) if k == bounded_slice else weights[0]
            h = mpmd.mark_stage_end(jnp.tanh(x[:, start:stop] @ first[0]))
            total += (layer(weights[1], h, chunks) ** 2).sum()
        return total

    step, (weights, xs) = sgd_step(loss, mpmd.Seq1F1B(2, SLICES)), problem(2)
    with mesh_of(2, data=2) as mesh:
        assert_like_jit(mesh, step, weights, xs, in_specs=(P(), P(None, "data")), partial_sums="all")
