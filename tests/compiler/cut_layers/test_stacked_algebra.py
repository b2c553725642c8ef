"""Work for each layer of a stack, as of second-order optimizers and of statistics, stays in parts."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax import lax

from mpmd.ir.stack import Stack
from tests.compiler.cut_layers.test_stacks import UNEVEN, argument, cut


def positive(x):
    """A positive definite matrix for each layer."""
    return x @ jnp.matrix_transpose(x) + 2 * jnp.eye(x.shape[-2])


def inverse_root(matrix):
    """As Shampoo takes it of a preconditioner, and SOAP its eigenvectors."""
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * values[..., None, :] ** -0.25) @ jnp.matrix_transpose(vectors)


def divided(row):
    """The orthogonal factor of a matrix, as of Muon with a decomposition instead of an iteration."""
    left, _, right = jnp.linalg.svd(row, full_matrices=False)
    return left @ right


def by_conjugate_gradients(row):
    def solve(_, b):
        return jax.scipy.linalg.solve(positive(row), b)

    return lax.custom_linear_solve(lambda v: positive(row) @ v, row[:, 0], solve, symmetric=True)


ALGEBRA = {
    "inverses and solutions": lambda x: (
        jnp.linalg.inv(positive(x)),
        jnp.linalg.solve(positive(x), x),
        jax.vmap(lambda row: jnp.linalg.solve(positive(row), row[:, 0]))(x),
        jax.vmap(by_conjugate_gradients)(x),
    ),
    "factors and solutions": lambda x: jax.vmap(
        lambda row: (
            jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(positive(row)), row),
            jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(positive(row)), row),
            jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(positive(row)), row, lower=True),
        )
    )(x),
    "roots": lambda x: (inverse_root(positive(x)), jax.vmap(divided)(x), jnp.linalg.qr(x)[1]),
    "determinants and norms": lambda x: (
        jnp.linalg.slogdet(positive(x)),
        jnp.linalg.norm(x, 2, axis=(1, 2)),
        jnp.linalg.cond(x),
        jnp.trace(x, axis1=1, axis2=2),
    ),
    "gradient of a spectral penalty": jax.grad(lambda x: jnp.sum(jnp.linalg.norm(x, 2, axis=(1, 2)) ** 2)),
    "indices of each layer": jax.vmap(lambda row: row[jnp.argmax(row[:, 0])]),
    "some of each layer replaced": jax.vmap(
        lambda row: (row.at[jnp.argmax(row[:, 0])].set(7), row.at[jnp.argmax(row[:, 0])].min(-3))
    ),
    "a window at a place of its own": jax.vmap(
        lambda row: lax.dynamic_slice_in_dim(row, jnp.argmax(row[:, 0]), 2)
    ),
    "ranks": lambda x: (jnp.median(x, 1), jnp.percentile(x, 99.0, axis=(1, 2))),
    "counts": lambda x: jax.vmap(lambda row: jnp.histogram(row, bins=3, range=(-5, 5))[0])(x),
    "windows": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "SAME"),
    "transforms": lambda x: jnp.abs(jnp.fft.fft(x, axis=2)),
    "convolutions": lambda x: jax.vmap(lambda row: jnp.convolve(row[:, 0], jnp.ones(2)))(x),
    "shuffled": lambda x: jax.vmap(jax.random.permutation)(jax.random.split(jax.random.key(0), 6), x),
}


@pytest.mark.usual(
    "gradient of a spectral penalty",
    "indices of each layer",
    "ranks",
)
@pytest.mark.parametrize("fun", ALGEBRA.values(), ids=ALGEBRA)
def test_work_for_each_layer_stays_in_parts(fun, stack=UNEVEN):
    x = argument() / 4
    expected = jax.tree.leaves(jax.jit(fun)(x))
    actual, made = cut(fun, x, stack=stack)
    for result, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(result), np.asarray(wanted), rtol=1e-4, atol=1e-5)
    assert made.result_stacks == (stack,) * len(expected)


def test_a_map_over_layers_in_batches_stays_in_parts():
    """As long as no batch is in two parts."""

    def penalty(w):
        return jnp.sum(lax.map(lambda row: jnp.linalg.norm(row, 2) ** 2, w, batch_size=2))

    test_work_for_each_layer_stays_in_parts(jax.grad(penalty), Stack(0, (2, 4)))
