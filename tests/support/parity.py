"""Compares a step on groups of devices with the same step under plain ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd


def mesh_of(groups, **axes):
    """``groups`` groups of this process's devices, each a submesh of ``axes``; for ``mpmd.MpmdMesh``."""
    shape = (groups, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage", *axes)), "stage")


def raw(leaf):
    """A leaf as numpy; of a typed key, the integers inside."""
    if isinstance(leaf, mpmd.MpmdArray):
        return leaf.raw_value()
    if jax.dtypes.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_close(actual, expected, tolerance=2e-5):
    """Asserts equal structure, dtypes and, to float32 rounding, values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, left), right in pairs:
        where = jax.tree_util.keystr(path)
        left, right = raw(left), raw(right)
        assert left.dtype == right.dtype and left.shape == right.shape, where
        np.testing.assert_allclose(
            left.astype(np.float64), right.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=where
        )


def assert_parity(step, state, *batch, mesh, steps=2, tolerance=2e-5, **options):
    """Runs ``state, rest = step(state, *batch)`` both ways, feeding the state back; returns the loaded step.

    Asserts that the next step neither moves nor compiles anything.
    """
    with mesh:
        compiled = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=mesh, **options)
        loaded = compiled.compile(state, *batch)
        reference = jax.jit(step)
        expected_state, actual_state = state, state
        for _ in range(steps):
            expected_state, expected = reference(expected_state, *batch)
            actual_state, actual = compiled(actual_state, *batch)
            assert_close(actual, expected, tolerance)
            assert compiled.compile(actual_state, *batch) is loaded, "the next step would compile again"
            arguments = zip(jax.tree.leaves(actual_state), loaded.plan.inputs, strict=False)
            for array, wanted in arguments:
                assert set(wanted.mpmd_idxs) <= set(array.mpmd_idxs), f"{wanted.path} would move"
        assert_close(actual_state, expected_state, tolerance)
        return loaded
