"""Slices of sequences: the gradients of the whole sequence, whatever the slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.explicit import assert_as_on_one_group, grid
from tests.support.models import init, make_step
from tests.support.parity import assert_close, mesh_of
from tests.support.programs.sliced_models import (
    LENGTH,
    VOCABULARY,
    bounds_of,
    decoder,
    schedule_of,
    sliced_loss,
    token_batch,
    whole_loss,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [bounds_of(3), (0, 4, 8, 12)], ids=["work", "lengths"])
def test_gradients_are_those_of_the_loss_without_slices(bounds):
    schedule = schedule_of()
    state, batch = init(decoder()), token_batch()
    expected = jax.jit(make_step(whole_loss, schedule))(state, *batch)
    with mesh_of(schedule.mpmd_dim) as mesh:
        step = mpmd.jit(make_step(sliced_loss(bounds=bounds), schedule), mesh)
        assert_close(step(state, *batch), expected, 1e-5)


def explicit_loss(params, tokens, targets):
    """Rows are sharded, which the types of all values say."""
    bounds, chunks, total = (0, 7, LENGTH), [], 0.0
    for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
        h = params["embed"].at[x].get(out_sharding=P("fsdp", None, None))
        h = mpmd.mark_stage_end(h + jnp.tanh(jnp.einsum("bld,de->ble", h, params["first"])))
        assert jax.typeof(h).sharding.spec[0] == "fsdp"
        chunks.append(h)
        before = jnp.concatenate(chunks, 1)
        scores = jnp.einsum("bqd,bkd->bqk", h, before)
        seen = jnp.arange(before.shape[1])[None] <= start + jnp.arange(h.shape[1])[:, None]
        mixed = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), before)
        total += jnp.mean((jnp.einsum("bld,de->ble", mixed, params["last"]) - y) ** 2)
    return total


@pytest.mark.slow
def test_explicit_axes():
    def step(params, tokens, targets):
        total, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(explicit_loss)(params, *mb),
            (tokens, targets),
            schedule_of(slices=2),
            operation=mpmd.Add,
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), total

    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, VOCABULARY, (3, 4, LENGTH))
    targets = numbers.normal(size=(3, 4, LENGTH, 4)).astype(np.float32)
    embed, *others = (numbers.normal(size=(size, 4)).astype(np.float32) / 2 for size in (VOCABULARY, 4, 4))
    params = {"embed": embed, "first": others[0], "last": others[1]}
    rows = P(None, "fsdp")
    with mpmd.MpmdMesh(grid(2, 2), "stage") as mesh:
        assert_as_on_one_group(
            mesh,
            step,
            args=(params, tokens, targets),
            specs=(jax.tree.map(lambda _: P(), params), rows, rows),
        )
