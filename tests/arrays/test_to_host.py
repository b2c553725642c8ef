"""Results are brought to the host together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.models import batch, shrink, weights


def with_key(state, key):
    return {"state": shrink(state, *batch()), "key": jax.random.split(key, 99), "wide": jnp.ones((99, 99))}


def test_a_tree_on_the_host(mesh):
    args = weights(2), jax.random.key(0)
    result = mpmd.jit(with_key, mesh)(*args)
    expected = jax.jit(with_key)(*args)
    got = mpmd.to_host(
        result
        | {"here": jnp.arange(3), "count": 3, "name": "run", "nothing": None, "at": np.datetime64("2026")}
    )
    assert (got["count"], got["name"], got["nothing"]) == (3, "run", None)
    assert isinstance(got["at"], np.datetime64)
    assert isinstance(got["here"], np.ndarray)
    key = got.pop("key")
    assert isinstance(key, jax.Array) and key.dtype == result["key"].dtype
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected["key"]))
    for leaf, wanted in zip(jax.tree.leaves(got["state"]), jax.tree.leaves(expected["state"]), strict=True):
        assert isinstance(leaf, np.ndarray) and leaf.dtype == wanted.dtype
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("read", [mpmd.to_host, jax.device_get])
def test_all_arrays_are_asked_for_before_one_is_waited_for(mesh, monkeypatch, read):
    log = []
    fetch = mesh.runtime.fetch

    def watched(mpmd_idx, handle):
        log.append("asked")
        future = fetch(mpmd_idx, handle)
        monkeypatch.setattr(future, "result", lambda result=future.result: log.append("read") or result())
        return future

    def step(xs):
        totals = mpmd.treduce(mpmd.mark_stage_end, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)
        return totals, totals * 2, totals.sum(), jnp.zeros((99, 99))

    results = mpmd.jit(step, mesh)(jnp.ones((2, 99)))
    monkeypatch.setattr(mesh.runtime, "fetch", watched)
    read(results)
    assert log == ["asked"] * 3 + ["read"] * 3  # the sum comes with the reply
    np.testing.assert_array_equal(results[0], np.full(99, 2))
    assert log[6:] == ["asked", "read"]  # no second copy is kept here
