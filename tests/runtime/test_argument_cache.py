"""Arrays that cannot change are sent to groups once."""

import gc
import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.ir.placement import Placement
from mpmd.runtime.argument_cache import ArgumentCache, PlacedPiece
from mpmd.runtime.requests import StepRequest
from tests.support.models import batch, mse, weights
from tests.support.parity import mesh_of


def evaluate(params, xs, ys):
    return mpmd.treduce(lambda mb: mse(params, *mb), (xs, ys), mpmd.ForwardOnly(2, 2), operation=mpmd.Add)


def watch(monkeypatch, mesh):
    """The shapes of what is sent with each step."""
    sent, ask = [], mesh.runtime.ask

    def watched(requests):
        steps = [request for request in requests.values() if isinstance(request, StepRequest)]
        arrays = [array for step in steps for array in step.host_arrays.values()]
        if steps:
            sent.append(sorted(array.shape for array in arrays))
        return ask(requests)

    monkeypatch.setattr(mesh.runtime, "ask", watched)
    return sent


def held(mesh):
    return sum(len(group.worker._values) for group in mesh.runtime._groups)


def test_what_a_step_is_called_with_again_is_not_sent_again(mesh, monkeypatch):
    step = mpmd.jit(evaluate, mpmd_mesh=mesh)
    params, (xs, ys) = weights(2), batch(3)
    xs = np.asarray(xs)
    sent = watch(monkeypatch, mesh)
    losses = [float(step(params, xs, ys)) for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    assert len(sent[0]) == 2 + len(jax.tree.leaves(params))
    assert sent[1] == sent[2] == [xs.shape]  # which its owner may have written to


def test_an_array_twice_in_a_call_and_on_other_groups(mesh, monkeypatch):
    def both(a, b, xs, ys):
        loss = evaluate(weights(2), xs, ys)
        return loss * a.sum(), b * 2

    array, data = jnp.arange(6.0), batch(3)
    step = mpmd.jit(both, mpmd_mesh=mesh)
    expected = jax.jit(both)(array, array, *data)
    for _ in range(2):
        for got, wanted in zip(step(array, array, *data), expected, strict=True):
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5)


def test_programs_that_shard_an_array_differently_each_have_theirs(monkeypatch):
    """Neither is sent it again, nor changes how it is sharded in each step."""
    params, data = weights(2), batch(3)
    with mesh_of(2, data=2) as mesh:
        steps = [
            mpmd.jit(evaluate, mpmd_mesh=mesh, in_specs=(spec, None, None)).compile(params, *data)
            for spec in (None, jax.P("data"))
        ]
        before = [float(step(params, *data)) for step in steps]
        sent, moved, device_put = watch(monkeypatch, mesh), [], jax.device_put

        def watched(value, *arguments, **options):
            moved.append(value)
            return device_put(value, *arguments, **options)

        monkeypatch.setattr(jax, "device_put", watched)
        assert [float(step(params, *data)) for step in steps] == before
    assert sent == [[], []]
    assert not moved


def test_what_the_caller_drops_the_groups_drop(mesh):
    step = mpmd.jit(evaluate, mpmd_mesh=mesh)
    params, data = weights(2), batch(3)
    float(step(params, *data))
    before = held(mesh)
    for _ in range(3):
        float(step(jax.tree.map(lambda p: p + 1, params), *data))
    gc.collect()
    float(step(params, *data))
    float(step(params, *data))
    assert held(mesh) <= before + 1  # the last loss


def test_after_a_failed_step_it_is_sent_again(mesh, monkeypatch):
    failing = [True]

    def look(x):
        if failing[0]:
            raise ValueError("no")
        return np.asarray(x)

    def checked(params, xs, ys):
        def loss(params, x, y):
            return mse(params, jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x), y)

        return mpmd.treduce(
            lambda mb: loss(params, *mb), (xs, ys), mpmd.ForwardOnly(2, 2), operation=mpmd.Add
        )

    params, data = weights(2), batch(3)
    step = mpmd.jit(checked, mpmd_mesh=mesh).compile(params, *data)
    sent = watch(monkeypatch, mesh)
    with pytest.raises(mpmd.TaskError):
        float(step(params, *data))
    failing[0] = False
    assert np.isfinite(float(step(params, *data)))
    assert sent[1] == sent[0]


def test_an_interrupted_step_gives_away_what_is_donated_and_sends_the_rest_again(mesh, monkeypatch):
    """Some groups may have run the step already, and hold the donated values no more."""

    def train(params, xs, ys):
        return jax.tree.map(lambda p: p * 2, params), evaluate(params, xs, ys)

    step = mpmd.jit(train, mpmd_mesh=mesh, donate_argnums=0)
    params, _ = step(weights(2), *batch(3))
    fresh = jax.tree.map(jnp.copy, batch(3))

    def interrupted(requests):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(mesh.runtime, "ask", interrupted)
        step(params, *fresh)
    with pytest.raises(ValueError, match="was deleted or donated to an earlier call"):
        step(params, *fresh)
    np.testing.assert_allclose(step(weights(2), *fresh)[1], jax.jit(evaluate)(weights(2), *fresh), rtol=1e-5)


def test_a_call_whose_arguments_cannot_be_collected_leaves_no_trace(mesh):
    """The last argument is a result that was lost, on other groups."""

    def fail(x):
        raise ValueError("no")

    def failing(params, xs, ys):
        value = jax.pure_callback(fail, jax.ShapeDtypeStruct(ys.shape, ys.dtype), ys)
        return value + evaluate(params, xs, ys)

    params, (xs, ys) = weights(2), batch(3)
    step = mpmd.jit(evaluate, mpmd_mesh=mesh)
    with mesh_of(2) as other:
        lost = mpmd.jit(failing, mpmd_mesh=other)(params, xs, ys)
        with pytest.raises(mpmd.TaskError):
            step(params, xs, lost)
    expected = jax.jit(evaluate)(params, xs, ys)
    np.testing.assert_allclose(float(step(params, xs, ys)), expected, rtol=1e-5)


def test_numpy_arguments_are_copied_once(mesh):
    def step(xs):
        return mpmd.treduce(
            lambda x: mpmd.mark_stage_end(x * 2).sum(), xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add
        )

    xs = np.ones((2, 2**20), np.float32)
    loaded = mpmd.jit(step, mpmd_mesh=mesh).compile(xs)
    float(loaded(xs))
    tracemalloc.start()
    try:
        total = float(loaded(xs))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 2 * xs.size
    assert xs.nbytes <= peak < 1.5 * xs.nbytes


def test_an_array_that_one_of_its_groups_has_lost_is_sent_again():
    cache = ArgumentCache(itertools.count(1).__next__, lambda mpmd_idxs, handle: None, num_groups=2)
    piece = PlacedPiece(jnp.ones(3), "", Placement((0, 1), ()))
    cache.add(piece, 1)
    assert cache.find(piece) == 1
    cache.forget_before(2, [1])
    assert cache.find(piece) is None
