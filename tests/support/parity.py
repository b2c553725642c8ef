"""Compares a step on groups of devices with the same step under plain ``jax.jit``."""

import contextlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

import mpmd


def mesh_of(groups, **axes):
    """``groups`` groups of this process's devices, each a submesh of ``axes``; for ``mpmd.MpmdMesh``."""
    shape = (groups, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage", *axes)), "stage")


def uneven_mesh_of(*shapes, parts=None):
    """A group of this process's devices for each shape, a dict of the same axes; for ``mpmd.MpmdMesh``."""
    devices = iter(jax.devices())
    return mpmd.MpmdMesh(
        [
            jax.sharding.Mesh(
                np.array(list(itertools.islice(devices, math.prod(axes.values())))).reshape(*axes.values()),
                tuple(axes),
            )
            for axes in shapes
        ],
        parts=parts,
    )


def raw(leaf):
    """A leaf as numpy; of a typed key, the integers inside."""
    if isinstance(leaf, mpmd.MpmdArray):
        return leaf.raw_value()
    if jax.dtypes.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_close(actual, expected, tolerance=2e-5):
    """Asserts equal structure, dtypes, weak types and values; of floats, to float32 rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_weak_types_equal(actual, expected)
    actual = mpmd.to_host(actual)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, left), right in pairs:
        where = jax.tree_util.keystr(path)
        left, right = raw(left), raw(right)
        assert left.dtype == right.dtype and left.shape == right.shape, (
            f"{where} is {left.dtype}{list(left.shape)}, not {right.dtype}{list(right.shape)}"
        )
        if jnp.issubdtype(left.dtype, jnp.inexact):
            wide = np.complex128 if np.iscomplexobj(left) else np.float64
            np.testing.assert_allclose(
                left.astype(wide), right.astype(wide), rtol=tolerance, atol=tolerance, err_msg=where
            )
        else:
            np.testing.assert_array_equal(left, right, err_msg=where)


def assert_weak_types_equal(actual, expected):
    """Asserts equal weak types of what are arrays of JAX in both pytrees."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, left), right in pairs:
        if isinstance(left, jax.Array) and isinstance(right, jax.Array):
            weak = [getattr(jax.typeof(array), "weak_type", False) for array in (left, right)]
            assert weak[0] == weak[1], f"the weak type of {jax.tree_util.keystr(path)} is {weak[0]}"


@contextlib.contextmanager
def compiles():
    """Counts what XLA compiles in this process, on any thread, in the list it gives."""
    counted = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            counted.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counted
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def copied(tree):
    """The pytree with arrays of its own, which a step may take over."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def parts_of(tree):
    """The arrays of a pytree, and those that arrays of stacked layers consist of."""
    return [part for array in jax.tree.leaves(tree) for part in array.parts]


def assert_stays(state, plan):
    """Asserts that the next step finds the state where it reads it."""
    numbers = plan.part.mpmd_idxs if plan.part else range(len(plan.programs))
    for array, leaf in zip(parts_of(state), plan.inputs, strict=False):
        read_on = {numbers[group] for group in leaf.mpmd_idxs}
        assert read_on <= set(array.mpmd_idxs), f"{leaf.path} would move"


def assert_replicas_equal(tree):
    """Asserts that all groups which hold a value hold the same bits."""
    for array in parts_of(tree):
        fetched = [array.runtime.fetch(mpmd_idx, array.handle) for mpmd_idx in array.mpmd_idxs]
        replicas = {np.asarray(future.result()).tobytes() for future in fetched}
        assert len(replicas) == 1, f"the replicas of {array} differ"


def assert_like_jit(mesh, step, *args, tolerance=2e-5, **options):
    """Compares the results of one step with those of plain JAX; returns the loaded step."""
    compiled = mpmd.jit(step, mesh, **options)
    assert_close(compiled(*args), jax.jit(step)(*args), tolerance)
    return compiled.only_step


def assert_parity(step, state, *batch, mesh, **options):
    """``assert_parity_on`` a mesh that is closed afterwards."""
    with mesh:
        return assert_parity_on(mesh, step, state, *batch, **options)


def assert_case_on(mesh, case, **options):
    """``assert_parity_on`` a mesh for a case of the table of programs, with the warning that it gives."""
    with case.warned():
        return assert_parity_on(
            mesh,
            case.step,
            case.state,
            *case.batch,
            steps=case.steps,
            tolerance=case.tolerance,
            **{**options, **case.options},
        )


def assert_parity_on(mesh, step, state, *batch, steps=2, tolerance=2e-5, **options):
    """Runs ``state, rest = step(state, *batch)`` both ways, feeding the state back; returns the loaded step.

    Asserts that steps after the first neither move the state nor compile anything in this process, and that
    the replicas of a value are equal.
    """
    reference = jax.jit(step)
    expected_state, expected_results = state, []
    for _ in range(steps):
        expected_state, result = reference(expected_state, *batch)
        expected_results.append(result)
    compiled = mpmd.jit(step, mesh, **options)
    loaded = compiled.compile(state, *batch)
    state = copied(state)
    for number, expected in enumerate(expected_results):
        data = copied(batch)
        with compiles() as counted:
            state, result = compiled(state, *data)
            jax.block_until_ready((state, result))
        assert number == 0 or not counted, f"step {number} compiled {len(counted)} times"
        assert_close(result, expected, tolerance)
        assert compiled.compile(state, *batch) is loaded, "the next step would compile again"
        assert_stays(state, loaded.plan)
        assert_replicas_equal((state, result))
    assert_close(state, expected_state, tolerance)
    return loaded
