"""Parts of a mesh: their names, their numbers, and steps that do not wait for those of other parts."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.ir.plan import Send
from tests.support.models import descend
from tests.support.parity import assert_close, mesh_of
from tests.support.plans import sent_values
from tests.support.small_plans import MICROBATCHES, ROWS, WIDTH, step_of

WEIGHTS = [np.eye(WIDTH, dtype=np.float32) / (i + 2) for i in range(2)]
BATCH = np.linspace(-1, 1, MICROBATCHES * ROWS * WIDTH, dtype=np.float32).reshape(MICROBATCHES, ROWS, WIDTH)
PATIENCE = 60


@pytest.fixture
def mesh():
    devices = np.array(jax.devices()[:4])
    with mpmd.MpmdMesh(
        jax.sharding.Mesh(devices, ("stage",)), "stage", parts={"actor": 2, "sampler": 2}, max_in_flight=2
    ) as mesh:
        yield mesh


def train_step(**options):
    return step_of(mpmd.Std1F1B(2), **options)


def test_arrays_have_the_numbers_of_the_mesh_and_reports_those_of_the_part(mesh):
    sampler = mesh.part("sampler")
    step = mpmd.jit(train_step(), sampler).compile(WEIGHTS, BATCH)
    weights, loss = step(WEIGHTS, BATCH)
    expected = jax.jit(train_step())(WEIGHTS, BATCH)
    np.testing.assert_allclose(loss, expected[1], rtol=1e-6)
    assert [weight.mpmd_idxs for weight in weights] == [(2,), (3,)]
    assert [leaf.mpmd_idxs for leaf in step.argument_leaves()] == [(2,), (3,)]
    where = "part 'sampler': its groups 0, 1 are groups 2, 3 of the mesh"
    assert str(step.report()).startswith(where)
    assert [group.mpmd_idx for group in step.report().groups] == [0, 1]
    assert where in str(mpmd.explain(step))
    profile = step.profile(weights, BATCH)
    assert {event.mpmd_idx for event in profile.events} == {0, 1}
    assert profile.plan.part.mpmd_idxs == (2, 3)
    assert len(step.simulate().events) == sum(len(program.runs) for program in step.plan.programs)


def test_a_part_is_planned_without_devices():
    planned = mpmd.AbstractMpmdMesh({"stage": 4}, "stage", parts={"actor": 2, "sampler": 2})
    lowered = mpmd.jit(train_step(), planned.part("sampler")).lower(WEIGHTS, BATCH)
    assert lowered.plan.part.mpmd_idxs == (2, 3)
    assert len(lowered.plan.programs) == 2


def test_an_error_has_the_number_of_the_mesh(mesh):
    def fails(x):
        raise ValueError("no")

    def step(weights, xs):
        def loss(x):
            x = mpmd.mark_stage_end(x @ weights[0])
            x = jax.pure_callback(fails, x, x)
            return (x @ weights[1]).sum()

        return mpmd.treduce(loss, xs, schedule=mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    with pytest.raises(mpmd.TaskError, match="group 3"):
        mpmd.jit(step, mesh.part("sampler"))(WEIGHTS, BATCH).block_until_ready()


def test_a_step_of_a_part_refuses_arrays_of_another(mesh):
    weights, _ = mpmd.jit(train_step(), mesh.part("actor"))(WEIGHTS, BATCH)
    message = r"args\[0\]\[0\], args\[0\]\[1\]: held by groups outside of the part 'sampler'.*mpmd.reshard"
    step = mpmd.jit(train_step(), mesh.part("sampler"))
    with pytest.raises(ValueError, match=message):
        step(weights, BATCH)
    step(WEIGHTS, BATCH)
    with pytest.raises(ValueError, match=message):  # of a step that was compiled for other arrays
        step(weights, BATCH)
    with pytest.raises(ValueError, match="held by groups outside"):
        mpmd.jit(lambda weights: weights[0] * 2, mesh.part("sampler"))(weights)


def test_parts_do_not_wait_for_one_another(mesh):
    """One part is full, with steps that wait; the other one computes, is called back, and is read."""
    may_go_on, called = threading.Event(), []

    def waits(x):
        assert may_go_on.wait(PATIENCE)
        return x

    def step_with(wait, note):
        def step(weights, xs):
            def loss(x):
                if wait:
                    x = jax.pure_callback(waits, x, x)
                x = mpmd.mark_stage_end(x @ weights[0])
                return (x @ weights[1]).sum()

            result = mpmd.treduce(loss, xs, schedule=mpmd.ForwardOnly(2, 2), operation=mpmd.Add)
            jax.debug.callback(note, result)
            return result

        return step

    slow = mpmd.jit(step_with(True, lambda _: called.append("actor")), mesh.part("actor"))
    quick = mpmd.jit(step_with(False, lambda _: called.append("sampler")), mesh.part("sampler"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            late = [slow(WEIGHTS, BATCH), slow(WEIGHTS, BATCH)]
            waiting = pool.submit(slow, WEIGHTS, BATCH)  # a third one has to wait
            results = [float(quick(WEIGHTS, BATCH)) for _ in range(4)]
            assert called == ["sampler"] * 4
            assert not waiting.done()
        finally:
            may_go_on.set()
        assert {*map(float, late), float(waiting.result(PATIENCE))} == set(results)


def test_only_the_groups_of_a_part_load_and_unload_its_programs(mesh):
    step = mpmd.jit(train_step(), mesh.part("sampler")).compile(WEIGHTS, BATCH)
    workers = [group.worker for group in mesh.runtime._groups]
    assert [len(worker._programs) for worker in workers] == [0, 0, 1, 1]
    assert step.collectives() == dict.fromkeys((e.name for e in step.plan.executables), ())
    step(WEIGHTS, BATCH)[1].block_until_ready()
    del step
    step = mpmd.jit(train_step(), mesh.part("actor")).compile(WEIGHTS, BATCH)
    step(WEIGHTS, BATCH)[1].block_until_ready()
    assert [len(worker._programs) for worker in workers[:2]] == [1, 1]


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"actor": 1}, ValueError, "parts has 1 groups, and the mesh 2: each group is in one part"),
        ({"actor": 0, "sampler": 2}, ValueError, r"parts\['actor'\]"),
        ({"actor": "2"}, TypeError, r"parts\['actor'\]"),
        ({1: 2}, TypeError, "the name of a part"),
    ],
)
def test_bad_parts(parts, error, message):
    with pytest.raises(error, match=message):
        mpmd.AbstractMpmdMesh([{"data": 1}] * 2, parts=parts)
    devices = np.array(jax.devices()[:2])
    with pytest.raises(error, match=message):
        mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage", parts=parts)


def test_a_name_that_is_no_part(mesh):
    with pytest.raises(ValueError, match="there is no part 'critic' of the mesh; its parts are 'actor'"):
        mesh.part("critic")
    with pytest.raises(ValueError, match="its parts are none; the mesh is made with parts="):
        mesh_of(2).part("critic")


def test_a_part_is_one_object_while_it_is_used(mesh):
    assert mesh.part("actor") is mesh.part("actor")
    assert mesh.parts == {"actor": range(2), "sampler": range(2, 4)}
    assert repr(mesh.part("actor")).startswith("part 'actor', groups 0, 1, of MpmdMesh(")


def two_loops(encoder_part, model_part):
    """Trains a model on the features of an encoder, each in a loop on groups of its own."""

    def encode(weights, x):
        return jnp.tanh(mpmd.mark_stage_end(jnp.tanh(x @ weights[0])) @ weights[1])

    def model_loss(weights, features):
        return jnp.mean((mpmd.mark_stage_end(features @ weights[0]) @ weights[1]) ** 2)

    def step(encoder, model, xs):
        features = mpmd.treduce(
            lambda x: encode(encoder, x),
            xs,
            schedule=mpmd.ForwardOnly(2, 2),
            operation=mpmd.Concat(),
            part=encoder_part,
        )
        loss, grads = mpmd.treduce(
            lambda features: jax.value_and_grad(model_loss)(model, features),
            features,
            schedule=mpmd.Std1F1B(2),
            operation=mpmd.Mean,
            part=model_part,
        )
        return encoder, descend(model, grads), loss

    return step


def test_loops_of_one_step_run_on_their_parts(mesh):
    step = mpmd.jit(two_loops("actor", "sampler"), mesh).compile(WEIGHTS, WEIGHTS, BATCH)
    encoder, model, loss = step(WEIGHTS, WEIGHTS, BATCH)
    expected = jax.jit(two_loops("actor", "sampler"))(WEIGHTS, WEIGHTS, BATCH)
    assert_close((encoder, model, loss), expected)
    assert [array.mpmd_idxs for array in (*encoder, *model)] == [(0,), (1,), (2,), (3,)]
    sends = {
        (program.mpmd_idx, instruction.dst)
        for program in step.plan.programs
        for instruction in program.instructions
        if isinstance(instruction, Send)
    }
    assert (1, 2) in sends  # the features go straight from part to part


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("actor", "critic"), r"is to run on the part 'critic', but .* with the parts 'actor', 'sampler'"),
        (("actor", 3), "part"),
    ],
)
def test_a_loop_on_a_part_that_is_not_there(mesh, parts, message):
    with pytest.raises((mpmd.CompileError, TypeError), match=message):
        mpmd.jit(two_loops(*parts), mesh).compile(WEIGHTS, WEIGHTS, BATCH)


def test_a_loop_with_more_groups_than_its_part():
    planned = mpmd.AbstractMpmdMesh({"stage": 4}, "stage", parts={"one": 1, "rest": 3})
    with pytest.raises(mpmd.CompileError, match="runs on 2 groups, but the part 'one' has 1"):
        mpmd.jit(two_loops("one", "rest"), planned).lower(WEIGHTS, WEIGHTS, BATCH)


def test_a_function_that_needs_no_group_of_its_part(mesh):
    assert mpmd.jit(lambda x: (), mesh.part("sampler"))(BATCH) == ()


def test_a_small_result_is_sent_and_not_what_it_is_made_of(mesh):
    """Both groups could take the largest element of a product that one of them computes."""
    square = mpmd.reshard(jnp.eye(WIDTH), to=mesh.part("sampler"))
    plan = mpmd.jit(lambda x: (x @ x).argmax(), mesh.part("sampler")).lower(square).plan
    assert {aval.shape for aval in sent_values(plan)} <= {()}
