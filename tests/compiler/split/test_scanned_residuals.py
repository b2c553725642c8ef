"""What the scans of a forward keep for those of its backward: what layers that are written out would keep."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.compiler.jaxprs.equations import all_eqns
from mpmd.keys import to_aval
from tests.support.levels import task_graph
from tests.support.models import BATCH, WIDTH, batch, rows, sgd_step, squares
from tests.support.parity import assert_close, mesh_of
from tests.support.programs.scanned_layers import scanned, stacked

LAYERS = 6
ROW = BATCH * WIDTH * 4
"""Bytes of a layer's activations."""


def gelu(p, h):
    return jax.nn.gelu(h @ p["w"] + p["b"])


def gated(p, h):
    normed = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
    return h + jax.nn.silu(normed @ p["w"]) * (normed @ p["w"].T + p["b"])


def half_precision(p, h):
    narrow = (h @ p["w"]).astype(jnp.bfloat16)
    return jnp.sin(narrow.astype(jnp.float32)) * narrow.astype(jnp.float32)


def in_a_scan(body):
    def loss(params, x, y):
        h = scanned(lambda h, p: mpmd.mark_stage_end(body(p, h), every=2), x, params["layers"])
        return squares(h, y)

    return loss


def written_out(body):
    def loss(params, x, y):
        h = x
        for i in range(LAYERS):
            h = body(rows(params["layers"], i), h)
            if i in (1, 3):
                h = mpmd.mark_stage_end(h)
        return squares(h, y)

    return loss


def works_of(loss):
    graph = task_graph(sgd_step(loss, mpmd.Std1F1B(3)), stacked(LAYERS), *batch(), groups=3)
    return {str(member.work): member for member in graph.stage_work}


def kept(works, stage=1):
    """What a backward reads of its forward."""
    made = works[f"fwd_{stage}"].makes
    return [to_aval(var) for var in works[f"bwd_{stage}"].reads if var in made]


@pytest.mark.parametrize("body", [gelu, gated, half_precision])
def test_a_scan_keeps_what_layers_that_are_written_out_keep(body):
    scan, written = (works_of(in_form(body)) for in_form in (in_a_scan, written_out))
    more = 3 * ROW  # each layer's input, of which the first is received anyway, and what the scan carries out
    for stage in range(3):
        total = sum(aval.nbytes for aval in kept(scan, stage))
        assert total <= sum(aval.nbytes for aval in kept(written, stage)) + more


def test_an_activation_keeps_its_input_and_its_tanh():
    shapes = [aval.shape for aval in kept(works_of(in_a_scan(gelu)))]
    assert shapes == [(2, BATCH, WIDTH)] * 3  # and the layer's input, which the weights' gradient needs


def test_what_is_dear_runs_once():
    works = works_of(in_a_scan(gated))
    forward, backward = (
        collections.Counter(eqn.primitive.name for eqn in all_eqns(works[name].eqns))
        for name in ("fwd_1", "bwd_1")
    )
    assert (forward["dot_general"], forward["rsqrt"], forward["logistic"]) == (2, 1, 1)
    assert not {"rsqrt", "logistic"} & backward.keys()


@pytest.mark.slow
def test_a_shard_map_in_the_body():
    def loss(params, x, y):
        def body(h, p):
            h = jax.shard_map(jnp.sin, in_specs=P("x"), out_specs=P("x"))(gelu(p, h))
            return mpmd.mark_stage_end(h, every=2), None

        return squares(lax.scan(body, x, params["layers"])[0], y)

    step = sgd_step(loss, mpmd.Std1F1B(3))
    params, data = stacked(), batch()
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))):
        expected = jax.jit(step)(params, *data)
    with mesh_of(3, x=2) as mesh:
        assert_close(mpmd.jit(step, mesh)(params, *data), expected)
