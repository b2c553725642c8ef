"""Steps whose layers devices can divide in different ways, as their users write them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.transformer_step import normed

ROWS, LENGTH, WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY, MICROBATCHES = 4, 8, 16, 4, 4, 64, 32, 2
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def step_of(loss, num_stages):
    """A train step of a loss of parameters and a microbatch."""

    def step(state, batch):
        params, kept = state
        value, grads = mpmd.treduce(
            lambda microbatch: jax.value_and_grad(loss)(params, microbatch),
            batch,
            schedule=mpmd.Std1F1B(num_stages),
            operation=mpmd.Mean,
        )
        updates, kept = OPTIMIZER.update(grads, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    return step


def state_of(init):
    """Parameters and what the optimizer keeps for them, as shapes."""
    return jax.eval_shape(lambda params: (params, OPTIMIZER.init(params)), jax.eval_shape(init))


def ones(shapes):
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


def floats(*shape):
    """The shape and dtype of a batch of microbatches."""
    return jax.ShapeDtypeStruct((MICROBATCHES, ROWS, *shape), jnp.float32)


def mean_square(x):
    return jnp.mean(jnp.square(x))


# A decoder of two layers, with fewer keys than queries, rotary positions and gated hidden units.

KEYS = 2


def rotated(x):
    """Rotary embeddings of (rows, length, heads, head)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 10 ** (jnp.arange(half) / half)
    first, second = jnp.split(x, 2, -1)
    parts = first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)
    return jnp.concatenate(parts, -1)


def decoder_layer(p, x):
    def heads(w, count):
        return (normed(x, p["norm"]) @ w).reshape(*x.shape[:2], count, HEAD)

    q, k, v = rotated(heads(p["q"], HEADS)), rotated(heads(p["k"], KEYS)), heads(p["v"], KEYS)
    q = q.reshape(*x.shape[:2], KEYS, HEADS // KEYS, HEAD)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ p["o"]
    h = normed(x, p["norm"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def decoder_loss(params, tokens):
    """The table is that of the first and of the last layer."""
    x = params["table"][tokens]
    for i, p in enumerate(params["layers"]):
        x = decoder_layer(p, x)
        if i < len(params["layers"]) - 1:
            x = mpmd.mark_stage_end(x)
    logits = x @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def decoder_params():
    shapes = {
        "norm": (WIDTH,),
        "q": (WIDTH, HEADS * HEAD),
        "k": (WIDTH, KEYS * HEAD),
        "v": (WIDTH, KEYS * HEAD),
        "o": (HEADS * HEAD, WIDTH),
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    return {"table": jnp.ones((VOCABULARY, WIDTH)), "layers": [ones(shapes)] * 2}


def decoder():
    tokens = jax.ShapeDtypeStruct((MICROBATCHES, ROWS, LENGTH), jnp.int32)
    return step_of(decoder_loss, 2), (state_of(decoder_params), tokens)


# Experts that each take some of the tokens.

EXPERTS, PLACES = 4, 4


def experts_layer(p, x):
    tokens = x.reshape(-1, WIDTH)
    choice = jax.nn.one_hot(jnp.argmax(tokens @ p["router"], -1), EXPERTS)
    place = jax.nn.one_hot((jnp.cumsum(choice, 0) * choice).sum(-1).astype(int) - 1, PLACES)
    dispatch = choice[:, :, None] * place[:, None, :]
    taken = jnp.einsum("tec,td->ecd", dispatch, tokens)
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, p["in"]))
    made = jnp.einsum("ecf,efd->ecd", hidden, p["out"])
    return x + jnp.einsum("tec,ecd->td", dispatch, made).reshape(x.shape)


def experts(layer=experts_layer):
    shapes = {"router": (WIDTH, EXPERTS), "in": (EXPERTS, WIDTH, HIDDEN), "out": (EXPERTS, HIDDEN, WIDTH)}

    def loss(params, x):
        return mean_square(layer(params[1], mpmd.mark_stage_end(layer(params[0], x))))

    return step_of(loss, 2), (state_of(lambda: [ones(shapes)] * 2), floats(LENGTH, WIDTH))


# Experts that each take the tokens of which they are among the best two; each row sorts its own tokens.

BEST = 2
BY_ROWS = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([], [])), [1], [0])
"""Of products of (rows, tokens, width), (experts, width, hidden) and sizes of (rows, experts)."""


def dropless_layer(p, x):
    shares, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), BEST)
    shares, chosen = (values.reshape(len(x), -1) for values in (shares, chosen))
    order = jnp.argsort(chosen)
    sizes = jax.vmap(functools.partial(jnp.bincount, length=EXPERTS))(chosen)
    sent = jnp.take_along_axis(x, order[..., None] // BEST, 1)
    hidden = jax.nn.relu(jax.lax.ragged_dot_general(sent, p["in"], sizes, BY_ROWS))
    made = jax.lax.ragged_dot_general(hidden, p["out"], sizes, BY_ROWS)
    made = jnp.take_along_axis(made, jnp.argsort(order)[..., None], 1) * shares[..., None]
    return x + made.reshape(*x.shape[:2], BEST, WIDTH).sum(2)


def dropless():
    return experts(dropless_layer)


# Convolutions without residual connections.


class Convolutions(nn.Module):
    """Images to images; two convolutions to a stage."""

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = nn.relu(nn.Conv(HEADS, (3, 3))(x))
            if i == 1:
                x = mpmd.mark_stage_end(x)
        return x


def convolutions():
    model = Convolutions()
    params = functools.partial(model.init, jax.random.key(0), jnp.ones((ROWS, LENGTH, LENGTH, HEADS)))
    step = step_of(lambda p, x: mean_square(model.apply(p, x)), 2)
    return step, (state_of(params), floats(LENGTH, LENGTH, HEADS))


# Query, key and value in one matrix, one after the other, and layers in a scan.


def fused_layer(p, x):
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, HEAD), 2, 0)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bshd->bhqs", q, k))
    x = x + jnp.einsum("bhqs,bshd->bqhd", scores, v).reshape(*x.shape[:2], -1) @ p["o"]
    return x + jax.nn.gelu(x @ p["in"]) @ p["out"]


def scanned():
    shapes = {
        "qkv": (2, WIDTH, 3 * HEADS * HEAD),
        "o": (2, HEADS * HEAD, WIDTH),
        "in": (2, WIDTH, HIDDEN),
        "out": (2, HIDDEN, WIDTH),
    }

    def loss(params, x):
        def layer(x, p):
            return mpmd.mark_stage_end(jax.checkpoint(fused_layer)(p, x)), None

        return mean_square(jax.lax.scan(layer, x, params)[0])

    return step_of(loss, 2), (state_of(lambda: ones(shapes)), floats(LENGTH, WIDTH))


MODELS = {made.__name__: made for made in (decoder, experts, dropless, convolutions, scanned)}
