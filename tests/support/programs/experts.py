"""Experts on the devices of a group, which a model spreads over a mesh of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import WIDTH, init, keys, squares
from tests.support.programs.table import program, train

EXPERTS = 4
OWN_AXIS = "expert"
ROWS = P(None, "fsdp")
"""Of a batch (microbatches, rows, width): the rows."""


def of_own_tokens(x, gates, experts):
    """Each device sends its tokens to the devices of their experts, and gets them back."""
    slots = jnp.einsum("te,td->etd", jnp.float32(gates > 0), x)
    slots = jax.lax.all_to_all(slots, OWN_AXIS, split_axis=0, concat_axis=1, tiled=True)
    made = jnp.einsum(
        "etf,efd->etd", jax.nn.silu(jnp.einsum("etd,edf->etf", slots, experts["up"])), experts["down"]
    )
    made = jax.lax.all_to_all(made, OWN_AXIS, split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("te,etd->td", gates, made)


@program()
def mixture_of_experts_on_a_mesh_of_its_own():
    """The mesh that the model's configuration has: other axes than a group's, and as many devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), (OWN_AXIS,))
    own = P(OWN_AXIS)
    mapped = jax.shard_map(of_own_tokens, mesh=mesh, in_specs=(own, own, own), out_specs=own)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def block(p, h):
        chances = jax.nn.softmax(h @ p["router"])
        best, chosen = jax.lax.top_k(chances, 2)
        routed = jax.nn.one_hot(chosen, EXPERTS)
        gates = jnp.einsum("tke,tk->te", routed, best / best.sum(-1, keepdims=True))
        balance = EXPERTS * jnp.vdot(routed.mean((0, 1)), chances.mean(0))
        return h + mapped(h, gates, p["experts"]), balance

    def loss(params, x, y):
        h, balance = mpmd.mark_stage_end(block(params[0], x))
        h, another = block(params[1], h)
        return squares(h, y) + 0.01 * (balance + another)

    def make(key):
        router, up, down = (
            jax.random.normal(k, (EXPERTS, WIDTH, WIDTH)) / 2 for k in jax.random.split(key, 3)
        )
        return {"router": router[0], "experts": {"up": up, "down": down}}

    params = [make(key) for key in keys(2)]
    specs = jax.tree.map(lambda leaf: P("fsdp") if jnp.ndim(leaf) == 3 else P(), init(params, optimizer))
    of_case = {"axes": {"fsdp": 2}, "options": {"in_specs": (specs, ROWS, ROWS)}, "steps": 3}
    return train(loss, params, 2, optimizer=optimizer, operation=mpmd.Mean, **of_case)
