"""Scanned decoders as training codes write them, and other bodies of more than one operation."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, keys, layer
from tests.support.programs.scanned_layers import LAYERS, WEIGHTS, in_parts, scanned, squares, stacked
from tests.support.programs.table import Case, loop, program, train

D_MODEL, HEADS, VOCABULARY = 8, 2, 11


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def rotated(x):
    """Rotary positions of ``[batch, sequence, heads, 2 * pairs]``."""
    pairs = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100 ** (jnp.arange(pairs) / pairs)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(p, h, mask):
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dthe->bsthe", norm(h, p["before"]), p["qkv"]), 2, 0)
    scores = jnp.einsum("bshe,bthe->bhst", rotated(q), rotated(k)) / 2
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32), -1)
    h = h + jnp.einsum("bhst,bthe,hed->bsd", weights.astype(h.dtype), v, p["out"])
    up, gate = jnp.moveaxis(jnp.einsum("bsd,dtf->bstf", norm(h, p["after"]), p["up"]), 2, 0)
    return h + (up * jax.nn.silu(gate)) @ p["down"]


def decoder(layers=LAYERS):
    embed, qkv, out, up, down = keys(5)
    weights = {
        "before": jnp.ones((layers, D_MODEL)),
        "after": jnp.ones((layers, D_MODEL)),
        "qkv": jax.random.normal(qkv, (layers, D_MODEL, 3, HEADS, D_MODEL // HEADS)) / 3,
        "out": jax.random.normal(out, (layers, HEADS, D_MODEL // HEADS, D_MODEL)) / 3,
        "up": jax.random.normal(up, (layers, D_MODEL, 2, 2 * D_MODEL)) / 3,
        "down": jax.random.normal(down, (layers, 2 * D_MODEL, D_MODEL)) / 3,
    }
    embedding = jax.random.normal(embed, (VOCABULARY, D_MODEL)) / 3
    return {"embed": embedding, "layers": weights, "norm": jnp.ones(D_MODEL)}


def tokens():
    (key,) = keys(1)
    xs = jax.random.randint(key, (4, 2, 6), 0, VOCABULARY)
    return xs, jnp.roll(xs, -1, -1)


def causal(x):
    return jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))


def head(params, h, y):
    logits = norm(h, params["norm"]) @ params["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def decoder_loss(wrap=lambda body: body, num_stages=3):
    def loss(params, x, y):
        mask = causal(x)

        def body(h, p):
            return mpmd.mark_stage_end(block(p, h, mask), num_stages=num_stages), None

        h, _ = lax.scan(wrap(body), params["embed"][x], params["layers"])
        return head(params, h, y)

    return loss


@program({"1F1B": mpmd.Std1F1B(3), "zero bubble": mpmd.ZeroBubble(3)})
def scanned_decoder(schedule):
    return train(decoder_loss(), decoder(), data=tokens(), optimizer=CLIPPED_ADAM, schedule=schedule)


@program()
def scanned_decoder_that_keeps_products():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    loss = decoder_loss(lambda body: jax.checkpoint(body, policy=policy, prevent_cse=False))
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    return train(loss, decoder(), data=tokens(), optimizer=optimizer)


@program()
def scanned_decoder_with_layers_along_another_axis():
    def loss(params, x, y):
        layers = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), params["layers"])
        return decoder_loss()({**params, "layers": layers}, x, y)

    params = decoder()
    params["layers"] = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), params["layers"])
    holds = in_parts("[0]['layers']['down'][:")
    return train(loss, params, data=tokens(), optimizer=CLIPPED_ADAM, holds=holds)


@program()
def layers_of_two_kinds_in_a_switch():
    """Attention of all tokens and of near ones, by a number for each layer."""

    def loss(params, x, y):
        mask = causal(x)
        near = mask & ~jnp.tril(mask, -3)

        def body(h, layer):
            p, kind = layer
            h = lax.switch(kind, [lambda h: block(p, h, near), lambda h: block(p, h, mask)], h)
            return mpmd.mark_stage_end(h, every=2), None

        h, _ = lax.scan(body, params["embed"][x], (params["layers"], jnp.arange(LAYERS) % 2))
        return head(params, h, y)

    return train(loss, decoder(), data=tokens(), optimizer=CLIPPED_ADAM)


@program()
def scanned_mixture_of_experts():
    """Experts chosen by a router, with losses and loads for each layer."""
    experts = 3

    def loss(params, x, y):
        def body(carry, p):
            h, balance = carry
            z = norm(h, p["before"])
            logits = z @ p["router"]
            chances = jax.nn.softmax(logits)
            chosen = jax.nn.one_hot(jnp.argmax(chances, -1), experts)
            load = jnp.mean(chosen, (0, 1))
            balance += experts * jnp.sum(load * jnp.mean(chances, (0, 1)))
            made = jnp.tanh(jnp.einsum("bse,bsd,edf->bsf", chosen, z, p["experts"]))
            h = h + jnp.sum(chances * chosen, -1, keepdims=True) * made
            statistics = {"load": load, "logits": jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)}
            return (mpmd.mark_stage_end(h, every=2), balance), statistics

        (h, balance), statistics = lax.scan(body, (params["embed"][x], 0.0), params["layers"])
        penalty = 0.01 * balance / LAYERS + 1e-3 * jnp.mean(statistics["logits"])
        return head(params, h, y) + penalty, statistics["load"]

    def step(state, xs, ys):
        params, opt_state = state
        grad = jax.value_and_grad(loss, has_aux=True)
        value, grads = loop(lambda x, y: grad(params, x, y), (xs, ys))
        updates, opt_state = CLIPPED_ADAM.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    router, weights = keys(2)
    params = decoder()
    params["layers"] = {
        "before": jnp.ones((LAYERS, D_MODEL)),
        "router": jax.random.normal(router, (LAYERS, D_MODEL, experts)),
        "experts": jax.random.normal(weights, (LAYERS, experts, D_MODEL, D_MODEL)) / 3,
    }
    return Case(step, (params, CLIPPED_ADAM.init(params)), tokens())


def gated(p, h):
    """Of which cheap operations are between products, reductions and transcendental functions."""
    normed = norm(h, 1.0)
    return h + jax.nn.silu(normed @ p["w"]) * (normed @ p["w"].T + p["b"])


@program({"once": {}, "reversed": {"reverse": True}, "unrolled": {"unroll": 2}})
def gated_layers(options):
    def loss(params, x, y):
        h = scanned(lambda h, p: mpmd.mark_stage_end(gated(p, h), every=2), x, params["layers"], **options)
        return squares(h, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def stacks_that_the_backward_reads_in_several_ways():
    """What a scan stacks is read by rows and as a whole; its constants are made in the forward."""

    def loss(params, x, y):
        gate = jnp.exp(-(x**2))

        def body(h, p):
            product = h @ p["w"] + p["b"]
            h = jnp.sin(product * gate * 2 + product**3) * gate
            return mpmd.mark_stage_end(h, every=2), h * 2

        h, doubled = lax.scan(body, x, params["layers"])
        return squares(h, y) + jnp.sum(jnp.tanh(doubled) ** 2) / 100

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def scans_within_stages():
    """The marks are between the scans, each of two layers."""

    def loss(params, x, y):
        h = x
        for i in range(3):
            layers = jax.tree.map(lambda leaf, i=i: leaf[2 * i : 2 * i + 2], params["layers"])
            h = scanned(lambda h, p: jax.nn.gelu(layer(p, h)), h, layers)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return squares(h, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM)
