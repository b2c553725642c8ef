"""Models whose layers are one scan over stacked weights, with a mark in its body."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import BATCH, CLIPPED_ADAM, SGD, WIDTH, batch, keys, layer
from tests.support.programs.table import Case, descend, loop, program, train

LAYERS = 6


def stacked(layers=LAYERS, width=WIDTH, dtype=jnp.float32, **others):
    """Weights of ``layers`` layers, stacked along the first axis."""
    (key,) = keys(1)
    w = jax.random.normal(key, (layers, width, width), dtype) / 2
    return {"layers": {"w": w, "b": jnp.full((layers, width), 0.1, dtype)}, **others}


def scanned(body, initial, xs, **options):
    """What a scan over layers carries at the end; ``body`` is without what it stacks."""
    return lax.scan(lambda carry, x: (body(carry, x), None), initial, xs, **options)[0]


def squares(h, y):
    return jnp.mean((h - y) ** 2)


def model(body=None, every=2, **options):
    """A loss whose layers are ``body``, with a mark behind."""
    body = body or (lambda h, p: layer(p, h))

    def loss(params, x, y):
        h = scanned(lambda h, p: mpmd.mark_stage_end(body(h, p), every=every), x, params["layers"], **options)
        return squares(h, y)

    return loss


def in_parts(*paths, parts=3):
    """Asserts that arguments are in parts, on as many groups."""

    def holds(loaded):
        for path in paths:
            found = [leaf for leaf in loaded.plan.inputs if path in leaf.path]
            assert len(found) == parts, [leaf.path for leaf in loaded.plan.inputs]
            assert len({leaf.mpmd_idxs for leaf in found}) == parts, found

    return holds


WEIGHTS = in_parts("[0]['layers']['w'][", "[0]['layers']['b'][")


def no_stack_travels_after_the_loop(loaded):
    """Asserts that an optimizer sends at most what it has computed over all layers: the size of one layer."""
    WEIGHTS(loaded)
    for edge in mpmd.explain(loaded).edges:
        outside = [value for value in edge.values if value.made_by is None or not value.made_by.in_loop]
        large = [value for value in outside if value.aval.nbytes > 4 * WIDTH**2]
        assert not large, large


OPTIMIZERS = {
    "sgd": SGD,
    "clipped adamw": CLIPPED_ADAM,
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lion": optax.lion(1e-2),
    "MultiSteps": optax.MultiSteps(CLIPPED_ADAM, 2),
    "apply_if_finite": optax.apply_if_finite(CLIPPED_ADAM, 3),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "flattened": optax.flatten(optax.adam(1e-2)),
    "per leaf": optax.multi_transform(
        {"decayed": optax.adamw(1e-2), "not": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda leaf: "decayed" if leaf.ndim > 2 else "not", params),
    ),
}


@program(OPTIMIZERS, on_ray={"clipped adamw"})
def scanned_layers_with(optimizer):
    return train(model(), stacked(), optimizer=optimizer, holds=no_stack_travels_after_the_loop)


SPREADS = {
    "every iteration": (3, {}),
    "every third": (9, {"every": 3}),
    "counts": (7, {"every": (1, 4, 2)}),
    "spread evenly": (8, {"num_stages": 3}),
}


@program(SPREADS, on_ray={"spread evenly"})
def stages_of_a_scan(spread):
    layers, options = spread

    def loss(params, x, y):
        return squares(
            scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), **options), x, params["layers"]), y
        )

    return train(loss, stacked(layers), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program({"one more stage for the head": 4, "head in the last stage": 3})
def embedding_and_head_around_a_scan(stages):
    (key,) = keys(1)
    table = jax.random.normal(key, (7, WIDTH))

    def loss(params, x, y):
        tokens = jnp.int32(jnp.abs(x[:, 0]) * 3) % 7
        h = params["embed"][tokens] + x
        h = scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=2), h, params["layers"])
        return squares(h @ params["head"], y)

    params = stacked(embed=table, head=jnp.eye(WIDTH))
    return train(loss, params, stages, optimizer=CLIPPED_ADAM, holds=WEIGHTS)


SCHEDULES = {
    "GPipe": (3, mpmd.GPipe(3)),
    "zero bubble": (3, mpmd.ZeroBubble(3)),
    "interleaved": (6, mpmd.Interleaved1F1B(6, mpmd_dim=3)),
    "V-shaped": (6, mpmd.ZeroBubbleV(6, mpmd_dim=3)),
    "one stage": (1, mpmd.Std1F1B(1)),
}


@program(SCHEDULES)
def schedules_of_a_scan(stages_and_schedule):
    stages, schedule = stages_and_schedule
    return train(
        model(every=LAYERS // stages), stacked(), optimizer=CLIPPED_ADAM, schedule=schedule, groups=3
    )


REMAT = {
    "full": {},
    "dots": {"policy": jax.checkpoint_policies.dots_saveable},
    "dots without batch": {"policy": jax.checkpoint_policies.dots_with_no_batch_dims_saveable},
    "everything": {"policy": jax.checkpoint_policies.everything_saveable},
    "no barriers": {"prevent_cse": False},
}


def two_products(p, h):
    return jnp.tanh(jnp.sin(h @ p["w"]) @ p["w"].T + p["b"])


@program(REMAT)
def remat_of_the_layer_and_its_mark(options):
    def body(h, p):
        return mpmd.mark_stage_end(two_products(p, h), every=2)

    def loss(params, x, y):
        return squares(scanned(jax.checkpoint(body, **options), x, params["layers"]), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program(REMAT)
def remat_of_the_layer_without_its_mark(options):
    body = jax.checkpoint(lambda h, p: two_products(p, h), **options)
    return train(model(body), stacked(), holds=WEIGHTS)


@program(REMAT, on_ray={"full"})
def remat_of_a_whole_loss_with_a_scan(options):
    loss = jax.checkpoint(model(lambda h, p: two_products(p, h)), **options)
    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program(REMAT)
def remat_of_a_whole_loss_with_marks(options):
    def loss(params, x, y):
        h = x
        for i in range(3):
            h = two_products(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), h)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return squares(h, y)

    return train(jax.checkpoint(loss, **options), stacked(3), optimizer=CLIPPED_ADAM)


@program()
def remat_within_remat_around_marks():
    def loss(params, x, y):
        inner = jax.checkpoint(lambda p, h: jnp.sin(jax.checkpoint(two_products)(p, h)))
        h = x
        for p in params:
            h = mpmd.mark_stage_end(inner(p, h))
        return squares(h, y)

    params = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked(3)["layers"]) for i in range(3)]
    return train(jax.checkpoint(loss), params)


@program(["body", "keys", "folded"])
def dropout_in_a_scan(kind):
    def loss(params, x, y):
        key = jax.random.fold_in(jax.random.key(3), jnp.int32(x[0, 0] * 1000))
        if kind == "keys":

            def body(h, p_key):
                p, own = p_key
                h = layer(p, h) * jax.random.bernoulli(own, 0.8, h.shape)
                return mpmd.mark_stage_end(h, every=2)

            h = scanned(body, x, (params["layers"], jax.random.split(key, LAYERS)))
        else:

            def body(carry, p):
                h, state = carry
                if kind == "folded":
                    own, state = jax.random.fold_in(key, state), state + 1
                else:
                    own, state = jax.random.split(state)
                h = layer(p, h) * jax.random.bernoulli(own, 0.8, h.shape)
                return mpmd.mark_stage_end((h, state), every=2)

            h, _ = scanned(body, (x, 0 if kind == "folded" else key), params["layers"])
        return squares(h, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program(["stacked", "carried", "both"])
def auxiliary_losses_of_layers(kind):
    def body(carry, p):
        h, total = carry
        h = layer(p, h)
        aux = jnp.mean(h**2)
        return (mpmd.mark_stage_end(h, every=2), total + aux), (aux, jnp.max(h, -1))

    def loss(params, x, y):
        (h, total), (aux, largest) = lax.scan(body, (x, 0.0), params["layers"])
        loss = squares(h, y)
        if kind != "carried":
            loss += 0.1 * jnp.sum(aux * jnp.arange(1.0, LAYERS + 1)) + 0.01 * jnp.max(largest)
        return loss + (0.1 * total if kind != "stacked" else 0)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def statistics_of_layers_as_results():
    """The loop's results have one row for each layer, and so are in parts."""

    def body(h, p):
        h = layer(p, h)
        return mpmd.mark_stage_end(h, every=2), (jnp.mean(h, 0), h[0, 0])

    def loss(params, x, y):
        h, statistics = lax.scan(body, x, params["layers"])
        return squares(h, y), statistics

    def step(params, xs, ys):
        grad = jax.value_and_grad(loss, has_aux=True)
        ((value, statistics), grads), largest = loop(
            lambda x, y: (lambda r: (r, r[0][1][1]))(grad(params, x, y)),
            (xs, ys),
            operation=((mpmd.Add, mpmd.Add), mpmd.Max),
        )
        return descend(params, grads), (value, statistics, largest)

    return Case(step, stacked(), batch(), holds=in_parts("['layers']['w']["))


@program()
def a_caches_worth_of_intermediates():
    def step(params, xs, ys):
        def body(h, p):
            h = layer(p, h)
            return mpmd.mark_stage_end(h, every=2), h

        h, cache = loop(lambda x, y: lax.scan(body, x, params["layers"]), (xs, ys), operation=mpmd.Concat(0))
        return params, (h, cache)

    return Case(step, stacked(), batch())


@program({"marked": True, "not marked": False})
def integers_and_more_in_the_carry(marked):
    def body(carry, p):
        h, more = carry
        h = layer(p, h) * (1 + more["count"] % 3) / 2 + 0 * more["constant"]
        more = {"count": more["count"] + 1, "flag": ~more["flag"], "constant": more["constant"]}
        if marked:
            return mpmd.mark_stage_end((h, more), every=2)
        return mpmd.mark_stage_end(h, every=2), more

    def loss(params, x, y):
        more = {"count": jnp.int32(0), "flag": jnp.array(True), "constant": x}
        h, more = scanned(body, (x, more), params["layers"])
        return squares(h, y) * jnp.where(more["flag"], 1.0, 2.0) * more["count"]

    return train(loss, stacked(), holds=WEIGHTS)


@program({"residual": {}, "reversed": {"reverse": True}, "unrolled": {"unroll": 4}})
def ways_to_scan(options):

    def body(h, p):
        return h + layer(p, h) * 0.5

    return train(model(body, **options), stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program(on_ray=True)
def layers_along_another_axis():
    def loss(params, x, y):
        layers = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), params["layers"])
        return model()({"layers": layers}, x, y)

    params = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), stacked())
    return train(loss, params, optimizer=CLIPPED_ADAM, holds=in_parts("[0]['layers']['w'][:"))


@program(["list", "expanded", "concatenated"])
def layers_stacked_in_the_loss(kind):
    def loss(params, x, y):
        if kind == "list":
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        elif kind == "expanded":
            layers = jax.tree.map(lambda *leaves: jnp.concatenate([leaf[None] for leaf in leaves]), *params)
        else:
            halves = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *params[i : i + 3]) for i in (0, 3)]
            layers = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *halves)
        return model()({"layers": layers}, x, y)

    layers = stacked()["layers"]
    params = [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(LAYERS)]
    return train(loss, params, optimizer=CLIPPED_ADAM)


@program(["slices", "split", "uneven"])
def several_scans_over_one_stack(kind):
    """The first scan has one stage, the second one two."""

    def loss(params, x, y):
        layers = params["layers"]
        at = 3 if kind == "uneven" else 2
        if kind == "split":
            first, second = (
                jax.tree.map(lambda leaf, i=i: jnp.split(leaf, [2])[i], layers) for i in range(2)
            )
        else:
            first, second = (
                jax.tree.map(lambda leaf, s=s: leaf[s], layers) for s in (slice(at), slice(at, LAYERS))
            )
        h = scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), num_stages=1), x, first)
        h = scanned(lambda h, p: mpmd.mark_stage_end(jnp.sin(layer(p, h)), num_stages=2), h, second)
        return squares(h, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def one_function_scanned_twice():
    """One jaxpr, whose mark is the same in both calls."""

    @jax.jit
    def run(h, layers):
        return scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=2), h, layers)

    def loss(params, x, y):
        first, second = (
            jax.tree.map(lambda leaf, s=s: leaf[s], params["layers"]) for s in (slice(4), slice(4, 8))
        )
        return squares(run(run(x, first), second), y)

    return train(loss, stacked(8), 4, optimizer=CLIPPED_ADAM, groups=4)


@program(["inner", "outer"])
def nested_scans(kind):
    """Blocks of two layers: a scan over blocks, with the mark, and one over the layers of each."""

    def block(h, p):
        return scanned(lambda h, q: layer(q, h), h, p)

    def loss(params, x, y):
        layers = params["layers"]
        if kind == "inner":
            layers = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), layers)
        return model(block, every=1)({"layers": layers}, x, y)

    params = stacked()
    if kind == "outer":
        params = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), params)
    return train(loss, params, optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def a_map_over_layers():
    """A penalty for each layer, of a map that has no marks."""

    def loss(params, x, y):
        norms = lax.map(lambda p: jnp.sum(jnp.tanh(p["w"]) ** 2), params["layers"])
        return model()(params, x, y) + 0.01 * jnp.sum(norms)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program({"jit": jax.jit, "named": jax.named_call})
def scan_within(wrapper):
    def loss(params, x, y):
        return wrapper(lambda p, h: wrapper(model())(p, h, y))(params, x)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def vmapped_scan():
    def loss(params, x, y):
        return jnp.mean(jax.vmap(model(), in_axes=(None, 0, 0))(params, x, y))

    return train(loss, stacked(), holds=WEIGHTS)


@program()
def a_weight_that_all_layers_share():
    def loss(params, x, y):
        def body(h, p):
            return mpmd.mark_stage_end(jnp.tanh(h @ p["w"] + p["b"] + h @ params["shared"]), every=2)

        return squares(scanned(body, x, params["layers"]), y)

    return train(loss, stacked(shared=jnp.eye(WIDTH) / 4), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def one_layer_applied_many_times():
    def loss(params, x, y):
        h = scanned(lambda h, _: mpmd.mark_stage_end(layer(params, h), every=2), x, None, length=LAYERS)
        return squares(h, y)

    return train(loss, {"w": jnp.eye(WIDTH) / 2, "b": jnp.full(WIDTH, 0.1)}, optimizer=CLIPPED_ADAM)


@program({"bfloat16": jnp.bfloat16, "float16": jnp.float16})
def mixed_precision_scans(dtype):
    def loss(params, x, y):
        layers = jax.tree.map(lambda leaf: leaf.astype(dtype), params["layers"])
        h = model_output(layers, x.astype(dtype))
        penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return squares(h.astype(jnp.float32), y) + 1e-3 * penalty

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, tolerance=0.03, holds=WEIGHTS)


def model_output(layers, x):
    return scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=2), x, layers)


@program()
def depth_dependent_scales():
    """What is scanned over is made of a range, and of a constant with a number for each layer."""
    scale = jnp.linspace(0.5, 1, LAYERS)

    def loss(params, x, y):
        depth = 1 / jnp.sqrt(1.0 + jnp.arange(LAYERS))

        def body(h, inputs):
            p, own, other = inputs
            return mpmd.mark_stage_end(h + layer(p, h) * own * other, every=2)

        return squares(scanned(body, x, (params["layers"], depth, scale)), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def moving_average_of_stacked_weights():
    def step(state, xs, ys):
        params, average, opt_state = state
        value, grads = loop(lambda x, y: jax.value_and_grad(model())(params, x, y), (xs, ys))
        updates, opt_state = CLIPPED_ADAM.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.1)
        return (params, average, opt_state), (value, optax.tree.norm(grads))

    params = stacked()
    return Case(
        step, (params, params, CLIPPED_ADAM.init(params)), batch(), holds=in_parts("[1]['layers']['w'][")
    )


@program()
def loss_scaling_over_a_scan():
    def step(state, xs, ys):
        params, scale = state

        def scaled(p, x, y):
            return model()(p, x, y) * scale

        value, grads = loop(lambda x, y: jax.value_and_grad(scaled)(params, x, y), (xs, ys))
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        new = descend(params, grads)
        params = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, params)
        return (params, jnp.where(finite, scale * 2, scale / 2)), value

    return Case(step, (stacked(), jnp.float32(8)), batch(), holds=in_parts("['layers']['w']["))


@program({"encoder": True, "memory": False})
def an_encoder_and_a_decoder(marks_memory):
    """The decoder's layers read what the encoder made."""

    def loss(params, x, y):
        h = scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=3), x, params["encoder"]["layers"])

        def body(carry, p):
            g, memory = carry if marks_memory else (carry, h)
            g = layer(p, g) + memory / 2
            return mpmd.mark_stage_end((g, memory) if marks_memory else g, every=3)

        g = scanned(body, (y, h) if marks_memory else y, params["decoder"]["layers"])
        return squares(g[0] if marks_memory else g, y)

    params = {"encoder": stacked(3), "decoder": stacked(6)}
    return train(loss, params, optimizer=CLIPPED_ADAM)


@program()
def sharded_stacks():
    from jax.sharding import PartitionSpec as P

    specs = {"layers": {"w": P(None, None, "x"), "b": P(None, "x")}}
    return train(
        model(),
        stacked(),
        optimizer=SGD,
        axes={"x": 2},
        options={"in_specs": ((specs, P()), P(None, "x"), P(None, "x"))},
        holds=WEIGHTS,
    )


class Block(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, h, _):
        h = h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(h))))
        return mpmd.mark_stage_end(h, every=2), None


class Model(nn.Module):
    axis: int
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(
            block, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=LAYERS
        )
        h, _ = layers(name="layers")(nn.Dense(WIDTH)(x), None)
        return nn.Dense(WIDTH)(nn.LayerNorm()(h))


@program(
    {"axis 0": (0, False), "axis 1": (1, False), "remat": (0, True), "remat, axis 1": (1, True)},
    on_ray={"remat, axis 1"},
)
def flax_linen_scan(kind):
    module = Model(*kind)

    def loss(params, x, y):
        return squares(module.apply(params, x), y)

    params = module.init(jax.random.key(0), batch()[0][0])
    return train(loss, params, optimizer=optax.adamw(1e-2))


@program({"plain": False, "remat": True})
def flax_nnx_scan(remat):
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, h):
            return h + jnp.tanh(self.linear(self.norm(h)))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Layer(rngs)

    graph, params = nnx.split(make(nnx.Rngs(0)))

    def loss(params, x, y):
        layers = nnx.merge(graph, params)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(h, one):
            apply = nnx.remat(lambda one, h: one(h)) if remat else (lambda one, h: one(h))
            return mpmd.mark_stage_end(apply(one, h), every=2)

        return squares(run(x, layers), y)

    return train(loss, params, optimizer=CLIPPED_ADAM)


@program({"plain": False, "checkpointed": True})
def equinox_scanned_modules(checkpointed):
    import equinox as eqx

    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key))
    layers = make(jax.random.split(jax.random.key(0), LAYERS))
    params, static = eqx.partition(layers, eqx.is_array)

    def loss(params, x, y):
        def body(h, p):
            one = eqx.combine(p, static)
            return mpmd.mark_stage_end(h + jax.vmap(one)(h), every=2), None

        wrapped = eqx.filter_checkpoint(body) if checkpointed else body
        h, _ = lax.scan(wrapped, x, params)
        return squares(h, y)

    return train(loss, params, optimizer=CLIPPED_ADAM)


@program(["slope", "forward"])
def scans_without_a_backward(kind):
    def step(params, xs, ys):
        if kind == "forward":
            return params, loop(lambda x, y: model()(params, x, y), (xs, ys))
        slope = jax.tree.map(jnp.ones_like, params)
        both = loop(lambda x, y: jax.jvp(partial(model(), x=x, y=y), (params,), (slope,)), (xs, ys))
        return params, both

    return Case(step, stacked(), batch(), holds=in_parts("['layers']['w']["))


@program()
def gradients_of_the_input_of_a_scan():
    def step(params, xs, ys):
        value, (grads, slope) = loop(
            lambda x, y: jax.value_and_grad(model(), argnums=(0, 1))(params, x, y), (xs, ys)
        )
        return descend(params, grads), (value, slope)

    return Case(step, stacked(), batch(), holds=in_parts("['layers']['w']["))


@program()
def a_frozen_stack():
    """Only what stands beside the stack is trained, as with adapters."""

    def step(state, xs, ys):
        def loss(trained, frozen, x, y):
            def body(h, p):
                own, adapter = p
                return mpmd.mark_stage_end(layer(own, h) + h @ adapter["w"], every=2)

            return squares(scanned(body, x, (frozen, trained)), y)

        frozen, trained = state
        value, grads = loop(lambda x, y: jax.value_and_grad(loss)(trained, frozen, x, y), (xs, ys))
        return (frozen, descend(trained, grads)), value

    state = stacked()["layers"], {"w": jnp.full((LAYERS, WIDTH, WIDTH), 0.01)}
    return Case(step, state, batch(), holds=in_parts("[0]['w'][", "[1]['w']["))


@program()
def skips_over_a_scan():
    """A part of the layers' inputs goes past the scan, and each layer reads the microbatch."""

    def loss(params, x, y):
        def body(h, p):
            return mpmd.mark_stage_end(layer(p, h) + x / 4, every=2)

        return squares(scanned(body, x, params["layers"]) + x, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def hidden_states_of_all_layers_are_averaged():
    def loss(params, x, y):
        def body(carry, p):
            h, total = carry
            h = layer(p, h)
            return (mpmd.mark_stage_end(h, every=2), total + h), None

        (h, total), _ = lax.scan(body, (x, jnp.zeros((BATCH, WIDTH))), params["layers"])
        return squares(h + total / LAYERS, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def a_callback_in_a_scan():
    def loss(params, x, y):
        def body(carry, p):
            h, count = carry
            jax.debug.callback(lambda count, mean: None, count, jnp.mean(h))
            return (mpmd.mark_stage_end(layer(p, h), every=2), count + 1)

        h, _ = scanned(body, (x, 0), params["layers"])
        return squares(h, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)
