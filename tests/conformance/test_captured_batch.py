"""A loss that reads its batch from around it: the error names the arrays, and says what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.explicit import draws
from tests.support.models import WIDTH, mse, planned, weights

ROWS = 8
X, Y = draws(ROWS, WIDTH, seed=1), draws(ROWS, WIDTH, seed=2)
MASK = np.tri(WIDTH, dtype=np.float32)

differentiated = functools.partial(mpmd.value_and_grad, num_microbatches=4, schedule=mpmd.Std1F1B(2))


def notes_of(error):
    """Without those of JAX."""
    return [note for note in getattr(error, "__notes__", []) if "from around it" in note]


def refused(step, *args):
    """The error of a step, which is the same traced for groups as under plain JAX."""
    texts = []
    for call in (jax.jit(step), functools.partial(planned, step)):
        with pytest.raises(ValueError) as info:
            call(*args)
        texts.append("\n".join([str(info.value), *notes_of(info.value)]))
    assert texts[0] == texts[1]
    return texts[0]


def test_an_argument_of_the_step():
    def step(params, batch):
        def loss_fn(params):
            return mse(params, batch["x"], batch["y"])

        return differentiated(loss_fn)(params)

    text = refused(step, weights(2), {"x": X, "y": Y})
    assert "what is passed has no array with rows to cut" in text
    assert "loss_fn reads batch['x'] (float32[8, 4]), batch['y'] (float32[8, 4]) from around it" in text
    assert text.endswith("Have it take the batch as an argument, and pass it by position")


def jitted(params, x, y):
    @jax.jit
    def loss_fn(params):
        return mse(params, x, y)

    return differentiated(loss_fn)(params)


def passed_by_name(params, x, y):
    return differentiated(mse)(params, x=x, y=y)


def of_an_object(params, x, y):
    class Trainer:
        def __init__(self):
            self.x, self.data = x, {"y": y}

        def loss_fn(self, params):
            return mse(params, self.x, self.data["y"])

    return differentiated(Trainer().loss_fn)(params)


def reads_the_module(params):
    return mse(params, X, Y)


def of_the_module(params, x, y):
    return differentiated(reads_the_module)(params)


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (of_the_module, "reads_the_module reads X (float32[8, 4]), Y (float32[8, 4])"),
        (jitted, "loss_fn reads x (float32[8, 4]), y (float32[8, 4])"),
        (passed_by_name, "mse reads x (float32[8, 4]), y (float32[8, 4])"),
        (of_an_object, "loss_fn reads float32[8, 4], float32[8, 4] from around it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_idioms(step, named):
    assert named in refused(step, weights(2), X, Y)


def test_a_key_beside_the_batch():
    """A raw key is two numbers, which look like rows."""

    def step(params, batch, rng):
        def loss_fn(params, rng):
            return mse(params, *batch) * jax.random.uniform(rng)

        return differentiated(loss_fn)(params, rng)

    text = refused(step, weights(2), (X, Y), jax.random.PRNGKey(0))
    assert "2 rows do not divide into 4 microbatches" in text
    assert "loss_fn reads batch[0] (float32[8, 4]), batch[1] (float32[8, 4]) from around it" in text


def test_a_part_of_the_batch():
    """The error of shapes that do not fit is JAX's, with a note."""

    def step(params, x, y):
        def loss_fn(params, x):
            return mse(params, x, y)

        return differentiated(loss_fn)(params, x)

    with pytest.raises((TypeError, ValueError), match="incompatible") as info:
        jax.jit(step)(weights(2), X, Y)
    (note,) = notes_of(info.value)
    assert "loss_fn reads y (float32[8, 4]) from around it, with all 8 rows of the batch" in note


def test_an_error_that_has_no_such_reason_has_no_note():
    def step(params, x, y):
        def loss_fn(params, x, y):
            return mse(params, x, y) + (MASK + x)

        return differentiated(loss_fn)(params, x, y)

    with pytest.raises((TypeError, ValueError)) as info:
        jax.jit(step)(weights(2), X, Y)
    assert not notes_of(info.value)


def test_a_variable_without_a_value_hides_no_error():
    def step(params, x, y):
        def loss_fn(params):
            return mse(params, x, later if later_is_set else y)

        later_is_set = False
        result = differentiated(loss_fn)(params)
        later = y
        return result, later

    assert "what is passed has no array with rows to cut" in refused(step, weights(2), X, Y)


def test_one_microbatch_is_the_whole_batch():
    """So nothing that is captured has other rows than it."""

    def step(params, x, y):
        def loss_fn(params, x):
            return mse(params, x, y) + jnp.sum(y @ x)

        return mpmd.value_and_grad(loss_fn)(params, x)

    with pytest.raises(TypeError) as info:
        jax.jit(step)(weights(2), X, Y)
    assert not notes_of(info.value)


def test_a_loss_that_reads_no_array_is_told_to_take_one():
    text = refused(lambda params: differentiated(lambda params: jnp.sum(params[0]["w"]))(params), weights(2))
    assert "pass the batch by position" in text and "around" not in text
