"""A Python list is one pytree of arrays; errors say so where it was meant as a list of microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd

PARAMS = np.eye(4, dtype=np.float32)


def loss_fn(params, x):
    return jnp.mean(mpmd.mark_stage_end(x @ params) ** 2)


def by_treduce(xs, loss=loss_fn):
    def of_microbatch(x):
        return jax.value_and_grad(loss)(PARAMS, x)

    return jax.eval_shape(
        lambda xs: mpmd.treduce(of_microbatch, xs, mpmd.Std1F1B(2), operation=mpmd.Mean), xs
    )


def by_value_and_grad(xs, num_microbatches, loss=loss_fn):
    differentiate = mpmd.value_and_grad(loss, num_microbatches=num_microbatches, schedule=mpmd.Std1F1B(2))
    return jax.eval_shape(differentiate, PARAMS, xs)


def arrays(*shapes):
    return [np.ones(shape, np.float32) for shape in shapes]


UNEQUAL = arrays((2, 4), (3, 4), (5, 4))
ONE_LENGTH = arrays((2, 3, 4), (2, 5, 4))


@pytest.mark.parametrize(
    ("call", "error", "name", "shapes"),
    [
        (lambda: by_treduce(UNEQUAL), ValueError, "xs", r"\(2, 4\), \(3, 4\), \(5, 4\)"),
        (lambda: by_treduce(ONE_LENGTH), TypeError, "xs", r"\(2, 3, 4\), \(2, 5, 4\)"),
        (
            lambda: by_treduce(ONE_LENGTH, lambda p, x: loss_fn(p, x.reshape(-1, 4))),
            AttributeError,
            "xs",
            r"\(2, 3, 4\), \(2, 5, 4\)",
        ),
        (lambda: by_value_and_grad(ONE_LENGTH, 4), ValueError, r"args\[1\]", r"\(2, 3, 4\), \(2, 5, 4\)"),
        (lambda: by_value_and_grad(ONE_LENGTH, 2), TypeError, r"args\[1\]", r"\(2, 3, 4\), \(2, 5, 4\)"),
        (lambda: mpmd.microbatches(UNEQUAL, 2), ValueError, "batch", r"\(2, 4\), \(3, 4\), \(5, 4\)"),
    ],
)
def test_a_list_of_microbatches(call, error, name, shapes):
    said = (
        rf"{name} is a list, which is read as one pytree .* shapes {shapes}\. .*stacked.* loop for each shape"
    )
    with pytest.raises(error, match=said) as caught:
        call()
    assert str(caught.value).count("is read as one pytree") == 1


def test_a_list_of_arrays_that_the_function_takes():
    def loss(params, x):
        return loss_fn(params, x[0]) + loss_fn(params, x[1])

    assert by_treduce(ONE_LENGTH, loss)[0].shape == ()
    assert by_value_and_grad(ONE_LENGTH, 2, loss)[0].shape == ()


def test_errors_of_arrays_stay_as_they_are():
    with pytest.raises(ValueError, match="4 rows do not divide into 3") as caught:
        by_value_and_grad(jnp.ones((4, 4)), 3)
    assert "pytree" not in str(caught.value)
