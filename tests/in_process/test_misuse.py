"""What is not a step, a mesh or an argument is refused at once, with what to write instead."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, init, layer, make_step, mse, weights
from tests.support.parity import mesh_of

STEP = make_step(mse, mpmd.Std1F1B(2))
STATE = init(weights(2))


def compiled(step=STEP, **options):
    return mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh_of(2), **options)


@pytest.mark.parametrize("schedule", ["1f1b", mpmd.Std1F1B], ids=["text", "class"])
def test_a_schedule_that_is_none(schedule):
    with pytest.raises(TypeError, match=r"must be a Schedule, such as mpmd.Std1F1B\(num_stages=4\)"):
        make_step(mse, schedule)(STATE, *batch())


def test_a_mesh_without_groups():
    with pytest.raises(TypeError, match=r"mpmd_mesh must be mpmd.MpmdMesh"):
        mpmd.mpmd_jit_with_loop(STEP, mpmd_mesh=mesh_of(2).jax_mesh)


@pytest.mark.parametrize(
    "call",
    [
        lambda: jax.jit(lambda *args: compiled()(*args))(STATE, *batch()),
        lambda: jax.eval_shape(compiled(), STATE, *batch()),
    ],
    ids=["jit", "eval_shape"],
)
def test_a_compiled_step_cannot_be_traced(call):
    with pytest.raises(TypeError, match=r"cannot be traced: call it outside of jax.jit"):
        call()


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda p: jax.vmap(f)(jax.tree.map(double, p))])
def test_a_loop_cannot_be_transformed_from_outside(transform):
    def step(params, xs, ys):
        def total(params):
            return mpmd.treduce(lambda mb: mse(params, *mb), (xs, ys), mpmd.Std1F1B(2), operation=mpmd.Add)

        return transform(total)(params)

    with pytest.raises(
        mpmd.CompileError, match=r"the treduce at .*test_misuse.py.* is differentiated"
    ) as caught:
        compiled(step)(weights(2), *batch())
    assert len(caught.value.faults) == 1


def double(leaf):
    return jnp.stack([leaf, leaf])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_specs": (P(), P())}, "in_specs is not a pytree prefix .*of length 2, but .* of length 3"),
        ({"in_specs": ([{"w": P()}], P(), P())}, r"in_specs is not a pytree prefix .*key path in_specs\[0\]"),
        ({"out_specs": (P(), P(), P())}, "out_specs is not a pytree prefix .*of length 3, but"),
    ],
)
def test_specs_that_do_not_match(options, message):
    with pytest.raises(mpmd.CompileError, match=message):
        compiled(**options)(STATE, *batch())


def test_specs_may_come_in_a_list():
    state, _ = compiled(in_specs=[P(), P(), P()])(STATE, *batch())
    assert jax.tree.leaves(state)[0].spec == P()


class Mean:
    def state(self, n, a):
        return jnp.zeros(a.shape, a.dtype), jnp.zeros(())

    def update(self, state, update, index):
        return state[0] + update, state[1] + 1


def test_an_operation_whose_state_is_no_array():
    with pytest.raises(TypeError, match=r"Mean.*\.state returned a tuple; the state of an operation is one"):
        mpmd.treduce(lambda x: jnp.sum(x), batch()[0], mpmd.GPipe(1), operation=Mean())


def test_positions_that_the_step_does_not_have():
    with pytest.raises(ValueError, match=r"donate_argnums has \[7\], but the step takes 3 positional"):
        compiled(donate_argnums=7)
    with pytest.raises(ValueError, match=r"static_argnums has \[3\], but the step takes 3 positional"):
        compiled(static_argnums=3)


def test_static_arguments_that_cannot_be():
    with pytest.raises(ValueError, match=r"the arguments \[0\] are both static and donated"):
        compiled(static_argnums=0, donate_argnums=0)(STATE, *batch())
    with pytest.raises(ValueError, match=r"the static argument 1 is a .*, which is not hashable; arrays"):
        compiled(static_argnums=1)(STATE, *map(np.asarray, batch()))


def test_too_many_marks_are_listed_with_their_names():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x), name="embedding")
        for _ in range(2):
            h = mpmd.mark_stage_end(h)
        return jnp.mean((layer(params[1], h) - y) ** 2)

    with pytest.raises(mpmd.CompileError, match=r"stage 0 ends at .*test_misuse.py.*: 'embedding'"):
        compiled(make_step(loss, mpmd.Std1F1B(2)))(STATE, *batch())


def test_results_behave_like_arrays():
    state, rest = compiled()(STATE, *batch())
    weight, loss = jax.tree.leaves(state)[0], jax.tree.leaves(rest)[0]
    value = np.asarray(loss)
    assert (loss / 4, 1 - loss, loss < 3, -loss) == (value / 4, 1 - value, value < 3, -value)
    total = loss
    total += 1
    np.testing.assert_array_equal(total, value + 1)
    np.testing.assert_array_equal(loss, value)
    assert weight.T.shape == weight.shape[::-1] and weight.mean() == np.asarray(weight).mean()
    assert len(list(weight)) == len(weight) and weight[0].shape == weight.shape[1:]
    assert not hasattr(weight, "fill")
    assert f"{weight}" == f"{np.asarray(weight)}" and f"{loss:.2f}" == f"{float(value):.2f}"
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        np.testing.assert_array_equal(copied, np.asarray(weight))
