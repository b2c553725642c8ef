"""Flax linen, nnx and equinox models, written as their users write them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx, struct
from flax.training import train_state

import mpmd
from tests.support.models import SGD, WIDTH, batch
from tests.support.programs.auxiliary_outputs import Last
from tests.support.programs.table import Case, descend, loop, program

ADAMW = optax.adamw(1e-2, eps=1e-3)


class Block(nn.Module):
    dropout: float = 0.0
    normalise: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.Dense(WIDTH)(x)
        if self.normalise:
            h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(h)
        return x + nn.Dropout(self.dropout, deterministic=not train)(nn.relu(h))


class Pipeline(nn.Module):
    """Blocks with a mark after each but the last."""

    block: nn.Module
    stages: int = 3

    @nn.compact
    def __call__(self, x, **options):
        for i in range(self.stages):
            x = self.block.clone(name=f"stage_{i}", parent=self)(x, **options)
            if i < self.stages - 1:
                x = mpmd.mark_stage_end(x)
        return x


@program(
    {"sgd": SGD, "clipped": optax.chain(optax.clip_by_global_norm(0.1), ADAMW)},
    on_ray={"clipped"},
)
def linen_train_state(optimizer):
    model = Pipeline(Block())

    def step(state, xs, ys):
        def loss(params, x, y):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(state.params, x, y), (xs, ys))
        return state.apply_gradients(grads=grads), (total, grads)

    params = model.init(jax.random.key(0), batch()[0][0])["params"]
    return Case(
        step, train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer), batch()
    )


class FullState(train_state.TrainState):
    batch_stats: dict
    key: jax.Array


@program(usual=True)
def linen_with_batch_norm_and_dropout():
    model = Pipeline(Block(dropout=0.5, normalise=True))

    def step(state, xs, ys):
        key, sub = jax.random.split(state.key)

        def loss(params, i):
            h, updated = model.apply(
                {"params": params, "batch_stats": state.batch_stats},
                xs[i],
                rngs={"dropout": jax.random.fold_in(sub, i)},
                mutable=["batch_stats"],
            )
            return jnp.mean((h - ys[i]) ** 2), updated["batch_stats"]

        (total, statistics), grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss, has_aux=True)(state.params, i),
            len(xs),
            mpmd.Std1F1B(3),
            ((mpmd.Add, Last()), mpmd.Add),
        )
        state = state.apply_gradients(grads=grads, batch_stats=statistics, key=key)
        return state, (total, grads)

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs if "batch_stats" in leaf.path]
        assert homes == [(0,), (0,), (1,), (1,), (2,), (2,)]

    variables = model.init(jax.random.key(0), batch()[0][0], train=False)
    state = FullState.create(apply_fn=model.apply, tx=ADAMW, key=jax.random.key(1), **variables)
    return Case(step, state, batch(), holds=holds)


@program()
def linen_evaluation_with_running_statistics():
    model = Pipeline(Block(dropout=0.5, normalise=True))

    def step(variables, xs, ys):
        def run(x, y):
            return jnp.mean((model.apply(variables, x, train=False) - y) ** 2)

        return variables, loop(run, (xs, ys), operation=mpmd.Concat())

    return Case(step, model.init(jax.random.key(0), batch()[0][0], train=False), batch())


@program()
def linen_layers_under_scan_and_remat():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + jnp.tanh(nn.Dense(WIDTH)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            return layers()(x, None)[0]

    model = Pipeline(Stack())

    def step(params, xs, ys):
        def loss(params, x, y):
            return jnp.mean((model.apply(params, x) - y) ** 2)

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(params, x, y), (xs, ys))
        return descend(params, grads), (total, grads)

    return Case(step, model.init(jax.random.key(0), batch()[0][0]), batch())


@program()
def linen_embedding_tied_to_the_head():
    class LanguageModel(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(8, WIDTH)
            h = mpmd.mark_stage_end(nn.LayerNorm()(embed(tokens)))
            h = mpmd.mark_stage_end(nn.MultiHeadDotProductAttention(2)(h, mask=nn.make_causal_mask(tokens)))
            return embed.attend(nn.RMSNorm()(h))

    model = LanguageModel()
    tokens = jax.random.randint(jax.random.key(0), (3, 2, 5), 0, 8)

    def step(state, tokens):
        params, opt_state = state

        def loss(params, tokens):
            logits = model.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        total, grads = loop(lambda t: jax.value_and_grad(loss)(params, t), (tokens,))
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (total, grads)

    params = model.init(jax.random.key(0), tokens[0, :, :-1])
    return Case(step, (params, ADAMW.init(params)), (tokens,))


class NnxModel(nnx.Module):
    def __init__(self, rngs, normalise=False, dropout=0.0):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(3 if normalise else 0)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else lambda h: h

    def __call__(self, h):
        for i, layer in enumerate(self.layers):
            h = jnp.tanh(layer(h))
            if self.norms:
                h = self.norms[i](h)
            h = self.dropout(h)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return h


@program(on_ray=True)
def nnx_with_an_optimizer():
    model = NnxModel(nnx.Rngs(0))
    graphdef, state = nnx.split((model, nnx.Optimizer(model, ADAMW, wrt=nnx.Param)))

    def step(state, xs, ys):
        model, optimizer = nnx.merge(graphdef, state)
        definition, params = nnx.split(model)

        def loss(params, x, y):
            return jnp.mean((nnx.merge(definition, params)(x) - y) ** 2)

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(params, x, y), (xs, ys))
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], (total, grads)

    return Case(step, state, batch())


@program()
def nnx_with_batch_norm_and_dropout():
    graphdef, params, rest = nnx.split(NnxModel(nnx.Rngs(0), normalise=True, dropout=0.5), nnx.Param, ...)

    def step(state, xs, ys):
        params, rest = state

        def loss(params, x, y):
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = jnp.mean((model(x) - y) ** 2)
            return value, nnx.split(model, nnx.Param, ...)[2]

        (total, rest), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(params, x, y),
            (xs, ys),
            operation=((mpmd.Add, Last()), mpmd.Add),
        )
        return (descend(params, grads, 0.01), rest), (total, grads)

    return Case(step, (params, rest), batch(), warns="draws the same random numbers")


class EqxModel(eqx.Module):
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    name: str = eqx.field(static=True, default="model")

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in jax.random.split(key, 3)]
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, h):
        for i, layer in enumerate(self.layers):
            h = jnp.tanh(jax.vmap(layer)(h))
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jax.vmap(self.norm)(h)


@program(on_ray=True)
def equinox_partitioned():
    params, static = eqx.partition(EqxModel(jax.random.key(0)), eqx.is_inexact_array)

    def step(state, xs, ys):
        params, opt_state = state

        def loss(params, x, y):
            return jnp.mean((eqx.combine(params, static)(x) - y) ** 2)

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(params, x, y), (xs, ys))
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), (total, grads)

    return Case(step, (params, ADAMW.init(params)), batch())


@program()
def equinox_with_filtered_gradients():
    """Only the last layer is trained."""
    arrays, static = eqx.partition(EqxModel(jax.random.key(0)), eqx.is_array)

    def step(arrays, xs, ys):
        spec = jax.tree.map(lambda _: False, arrays)
        spec = eqx.tree_at(lambda m: (m.layers[2].weight, m.norm.bias), spec, (True, True))
        trained, frozen = eqx.partition(arrays, spec)

        @eqx.filter_value_and_grad
        def loss(trained, x, y):
            return jnp.mean((eqx.combine(trained, frozen, static)(x) - y) ** 2)

        total, grads = loop(lambda x, y: loss(trained, x, y), (xs, ys))
        updates = jax.tree.map(lambda g: -0.1 * g, grads)
        return eqx.apply_updates(arrays, updates), (total, grads)

    return Case(step, arrays, batch())


@program()
def equinox_mlp_cut_between_its_layers():
    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(arrays, xs, ys):
        def loss(arrays, x, y):
            model = eqx.combine(arrays, static)
            h = x
            for i, layer in enumerate(model.layers):
                h = jax.vmap(layer)(h)
                if i < len(model.layers) - 1:
                    h = mpmd.mark_stage_end(jax.vmap(jax.vmap(model.activation))(h))
            return jnp.mean((h - y) ** 2)

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(arrays, x, y), (xs, ys))
        return descend(arrays, grads), (total, grads)

    return Case(step, arrays, batch())


@struct.dataclass
class Everything:
    """A state of a user's own, with a part that is no array."""

    params: dict
    opt_state: optax.OptState
    step: int
    key: jax.Array
    best: float
    name: str = struct.field(pytree_node=False)


@program(on_ray=True)
def a_state_of_ones_own():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(0.1, 0.0, 10)))

    def step(state, xs, ys):
        key, sub = jax.random.split(state.key)

        def loss(params, x, y):
            h = x
            for i, name in enumerate(sorted(params)):
                noise = jax.random.normal(jax.random.fold_in(sub, i), h.shape)
                h = jnp.tanh(h @ params[name]["kernel"] + params[name]["bias"]) + 0.01 * noise
                if i < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - y) ** 2)

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(state.params, x, y), (xs, ys))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {"loss": total, "step": state.step, "norm": optax.tree.norm(grads), "name": None}
        return state.replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
            key=key,
            best=jnp.minimum(state.best, total),
        ), metrics

    params = {
        f"layer{i}": {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / 2, "bias": jnp.zeros(WIDTH)}
        for i, key in enumerate(jax.random.split(jax.random.key(0), 3))
    }
    state = Everything(params, optimizer.init(params), 0, jax.random.key(1), 1e9, "mine")
    return Case(step, state, batch(), warns="draws the same random numbers")
