"""Steps over explicit mesh axes, in the style of public training codes, and what they are compared with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.parity import assert_close

EXPLICIT = (AxisType.Explicit,) * 2
ROWS = P(None, "fsdp")
"""Of a batch (microbatches, rows, ...): the rows."""


def grid(groups, *sizes, types=None):
    """A mesh of this process's devices; that of a group is ``grid(1, *sizes)``."""
    shape = (groups, *sizes)
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    types = types or (AxisType.Explicit,) * len(shape)
    return Mesh(devices, ("stage", "fsdp", "tensor")[: len(shape)], axis_types=types)


def draws(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 2


def dense(p, h):
    """Weights sharded over the batch's axis are gathered where they are used, as in gemma."""
    return jnp.einsum("bk,kn->bn", h, reshard(p["w"], P()), out_sharding=P("fsdp"))


def residual(p, h):
    assert jax.typeof(h).sharding.spec[0] == "fsdp", jax.typeof(h)
    return h + jax.nn.silu(dense(p, h))


def attention(p, h):
    """Scores and a mask whose shardings JAX infers, and zeros that are asked for."""
    scores = jnp.where(jnp.tri(h.shape[1], dtype=bool), h[:, :, None] * h[:, None, :], -1e9)
    out = jnp.einsum("bij,bj->bi", jax.nn.softmax(scores), dense(p, h))
    return out + jnp.zeros(h.shape, out_sharding=P("fsdp"))


def experts(p, h):
    """A ``shard_map`` within the step, as of a mixture of experts."""

    def local(w, h):
        return jnp.tanh(h @ w) + jax.lax.pmean(jnp.mean(h), "fsdp")

    mapped = jax.shard_map(local, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
    return mapped(reshard(p["w"], P()), h)


def left_to_xla(p, h):
    """A part whose shardings are left to the compiler."""

    def auto(w, h):
        return jnp.tanh(jax.lax.with_sharding_constraint(h @ w, P("fsdp")))

    return jax.sharding.auto_axes(auto, out_sharding=P("fsdp", None))(p["w"], h)


def layers(p, h):
    """A scan over layers, computed again in the backward."""
    w = reshard(p["w"], P())

    def layer(h, _):
        h = jnp.tanh(jnp.einsum("bk,kn->bn", h, w, out_sharding=P("fsdp")))
        return h + jnp.zeros_like(h), None

    return jax.checkpoint(lambda h: jax.lax.scan(layer, h, None, length=2)[0])(h)


@mpmd.per_group
def _scaled(w, h):
    assert jax.typeof(h).sharding.spec[0] == "fsdp"
    size = jax.sharding.get_abstract_mesh().shape["fsdp"]
    return jnp.tanh(jnp.einsum("bk,kn->bn", h, w, out_sharding=P("fsdp"))) * size / 2


def of_each_group(p, h):
    """What depends on the size of the submesh; the result does where groups differ."""
    return _scaled(reshard(p["w"], P()), h)


BLOCKS = {f.__name__: f for f in (residual, attention, experts, left_to_xla, layers, of_each_group)}


class Product:
    """An operation of the user's own, which knows nothing of shardings."""

    def state(self, n, a):
        return jnp.ones(a.shape, a.dtype)

    def update(self, state, value, index):
        return state * value


def make_step(block, schedule=None, operation=mpmd.Max):
    """``params, results = step(params, tokens, targets)`` of two stages, behind a table of embeddings."""

    def step(params, tokens, targets):
        def loss(params, tokens, targets):
            h = params["table"].at[tokens].get(out_sharding=P("fsdp", None))
            h = first = mpmd.mark_stage_end(block(params["layers"][0], h))
            h = block(params["layers"][1], h)
            return jnp.mean((h - targets) ** 2), first

        def of_microbatch(microbatch):
            (value, hidden), grads = jax.value_and_grad(loss, has_aux=True)(params, *microbatch)
            return value, hidden, grads

        losses, hidden, grads = mpmd.treduce(
            of_microbatch,
            (tokens, targets),
            schedule=schedule or mpmd.Std1F1B(2),
            operation=(mpmd.Concat(), operation, mpmd.Add),
        )
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, grads), (losses, hidden, norm)

    return step


def tensor_parallel(p, h):
    """A product whose columns are split along a second axis, and one that is summed over this axis."""
    w = reshard(p["w"], P(None, "tensor"))
    hidden = jnp.tanh(jnp.einsum("bk,kn->bn", h, w, out_sharding=P("fsdp", "tensor")))
    return h + jnp.einsum("bn,kn->bk", hidden, w, out_sharding=P("fsdp"))


def assert_two_axes(mesh):
    """Trains weights that are gathered along one axis and split along the other one."""
    args, (specs, *rows) = arguments()
    specs = {**specs, "layers": [{"w": P("fsdp", "tensor")}] * 2}, *rows
    loaded, (params, _), _ = assert_as_on_one_group(
        mesh, make_step(tensor_parallel), args, specs, grid(1, 2, 2)
    )
    assert params["layers"][1]["w"].spec == P("fsdp", "tensor")
    return loaded


def arguments():
    """The arguments of a step, and their specs."""
    params = {"table": draws(16, 8), "layers": [{"w": draws(8, 8, seed=i)} for i in (1, 2)]}
    tokens = np.random.default_rng(3).integers(0, 16, size=(4, 4))
    specs = {"table": P(), "layers": [{"w": P("fsdp")}] * 2}
    return (params, tokens, draws(4, 4, 8, seed=4)), (specs, ROWS, ROWS)


def assert_as_on_one_group(mesh, step, args=None, specs=None, submesh=None, **options):
    """Runs two steps on groups, and on one group's devices under ``jax.jit``, and compares.

    ``args`` and ``specs`` are those of ``arguments`` where they are not given.
    """
    if args is None:
        args, specs = arguments()
    submesh = submesh or grid(1, 2)
    with jax.set_mesh(submesh):
        put = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(submesh, spec)), args, specs)
        reference = jax.jit(step)
        expected, _ = reference(*put)
        expected = reference(expected, *put[1:])
    compiled = mpmd.jit(step, mesh, in_specs=specs, **options)
    actual, _ = compiled(*args)
    actual = compiled(actual, *args[1:])
    assert_close(actual, expected)
    return compiled.compile(*args), actual, expected
