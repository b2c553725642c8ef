"""The loop of a described step: the model of a microbatch, its derivative, and how results are combined."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import FromZeros, Last, rows
from tests.support.random_programs.layers import BATCH, WIDTH, apply
from tests.support.random_programs.schedules import make

KEYS = ("key", "raw_key")
SIDES = {
    "count": lambda x, y: jnp.int32(0),
    "flags": lambda x, y: y > 1,
    "input": lambda x, y: x,
    "penalty": lambda x, y: jnp.float32(0),
    "half": lambda x, y: jnp.zeros(WIDTH, jnp.float16),
    "complex": lambda x, y: jnp.zeros(WIDTH, jnp.complex64),
    "empty": lambda x, y: x[:0],
}


def touch(kind, side, h, above):
    """The activations after reading a side value, and the side value after seeing them.

    ``above``: what is compared with, so low in imprecise programs that all is above it.
    """
    match kind:
        case "count":
            return h * (1 + side % 3).astype(h.dtype) / 3, side + (h > above).sum(dtype=jnp.int32)
        case "flags":
            return jnp.where(side[:, None], h, h / 2), side ^ (h[:, 0] > above)
        case "input":
            return (h + side.astype(h.dtype)) / 2, side
        case "penalty":
            return h, side + (jnp.float32(h) ** 2).mean() / 4
        case "half":
            return (h + side.astype(h.dtype)) / 2, h.mean(0).astype(side.dtype)
        case "complex":
            return (h + side.real.astype(h.dtype)) / 2, side * 0.5j + h[0]
        case "empty":
            return h + side.sum().astype(h.dtype), h[:0].astype(side.dtype)
    key, mine = jax.random.split(side)
    return h * jax.random.bernoulli(mine, 0.8, h.shape).astype(h.dtype), key


def as_list(program, params):
    """One ``{"w", "b"}`` for each weight."""
    if not program.stacked:
        return params
    return [rows(params, i) for i in range(len(program.weights))]


def prepared(names, params):
    """Parameters after some of ``scale``, ``normalise`` and ``merge``."""
    if "scale" in names:
        params = jax.tree.map(lambda leaf: leaf * 0.9, params)
    if "normalise" in names:
        params = jax.tree.map(lambda leaf: leaf / (1 + jnp.linalg.norm(leaf) / 4), params)
    if "square" in names:
        params = jax.tree.map(lambda leaf: jnp.tanh(leaf @ leaf.T @ leaf) if leaf.ndim == 2 else leaf, params)
    if "merge" in names and isinstance(params, list):
        others = [*params[1:], params[0]]
        params = jax.tree.map(lambda a, b: a + (b / 4).astype(a.dtype), params, others)
    return params


def forward(program, params, x, y, index, keys):
    """The loss of a microbatch, and the values that outputs may ask for."""
    names = program.inside
    params = as_list(program, prepared(names, params))
    sides = {side.kind: SIDES[side.kind](x, y) for side in program.sides if side.kind not in KEYS}
    sides |= keys
    marked = [side.kind for side in program.sides if side.marked]
    above = 0.1234 if program.precise else -100
    if "inputs" in names:
        x = x * params[0]["b"].astype(x.dtype)
    before, after, carried = [], [], {}
    h = x
    for i, stage in enumerate(program.stages):
        h = h.astype(stage.dtype)
        for skip in stage.skips:
            source = {"before": before, "after": after, "marks": carried}[skip.route][i - skip.back]
            h = (h + source.astype(h.dtype)) / 2
        if stage.reads_input:
            h = (h + x.astype(h.dtype)) / 2
        for layer in stage.layers:
            h = apply(layer, params, h, index)
        if stage.touches_sides:
            for kind in sides:
                h, sides[kind] = touch(kind, sides[kind], h, above)
        if stage.stops:
            h = lax.stop_gradient(h)
        before.append(h)
        if i < len(program.stages) - 1 or program.last_mark:
            mark = jax.jit(mpmd.mark_stage_end) if stage.jit_mark else mpmd.mark_stage_end
            carried = {j: carried[j] for j in carried_past(program, i)}
            past = h if stage.marks_sides_only and marked else None
            weights = params if program.marks_weights else None
            anchor = (h if past is None else None, {kind: sides[kind] for kind in marked}, carried, weights)
            h, changed, carried, weights = mark(anchor)
            h = h if past is None else past
            params = params if weights is None else weights
            sides |= changed
        after.append(h)
        carried[i] = h
    last = jnp.float32(after[-1 - program.loss_back])
    loss = loss_of(program, params, last, y) + sides.get("penalty", 0)
    sides = {kind: jax.random.key_data(side) if kind == "key" else side for kind, side in sides.items()}
    values = {"h": h, "first": before[0], "one": 1, "x": x, "y": y, "index": index, "weight": params[0]["b"]}
    return loss, values | sides


def carried_past(program, i):
    """The earlier stages whose results pass the mark after stage ``i``, because a later stage adds them."""
    sources = (
        reader - skip.back
        for reader in range(i + 1, len(program.stages))
        for skip in program.stages[reader].skips
        if skip.route == "marks"
    )
    return sorted({source for source in sources if source < i})


def loss_of(program, params, h, y):
    if program.loss == "squares":
        loss = jnp.mean((h - y[:, None] / WIDTH) ** 2)
    else:
        loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], -1))
    if program.l2:
        loss += 0.01 * sum(jnp.sum(jnp.float32(leaf) ** 2) for leaf in jax.tree.leaves(params))
    return loss


def trainable_of(program, params):
    """The part of the parameters that is differentiated."""
    if program.stacked:
        return params
    return {i: p for i, p in enumerate(params) if i not in program.undifferentiated}


def joined(program, params, trainable):
    """All parameters, with that part replaced."""
    if program.stacked:
        return trainable
    return [trainable.get(i, p) for i, p in enumerate(params)]


def body_of(program, params, step_keys):
    """The function of a microbatch that the loop applies."""
    trainable = trainable_of(program, params)

    def loss(trainable, x, y, index, keys):
        whole = joined(program, params, trainable)
        if program.vmap != "loss":
            return forward(program, whole, x, y, index, keys)
        one = jax.vmap(lambda x, y: forward(program, whole, x[None], y[None], index, keys))
        losses, values = one(x, y)
        return losses.mean(), values

    if program.jit == "loss":
        loss = jax.jit(loss)

    def derived(x, y, index, keys):
        if program.mode == "grad":
            arguments = (0, 1) if program.input_gradient else (0,)
            function = jax.value_and_grad(loss, arguments, has_aux=True)
            (value, values), gradients = function(trainable, x, y, index, keys)
            inputs = {"input": gradients[1]} if program.input_gradient else {}
            return {"loss": value, "values": values, "gradients": gradients[0], **inputs}
        if program.mode == "jvp":
            value, slope, values = jax.jvp(
                lambda trainable: loss(trainable, x, y, index, keys),
                (trainable,),
                (trainable,),
                has_aux=True,
            )
            return {"loss": value, "values": values, "slope": slope}
        value, values = loss(trainable, x, y, index, keys)
        return {"loss": value, "values": values}

    def body(x, y, index, keys):
        if not program.keys_in_batch:
            keys = {kind: jax.random.fold_in(key, index) for kind, key in step_keys.items()}
        if program.vmap == "gradient":
            result = jax.vmap(lambda x, y: derived(x[None], y[None], index, keys))(x, y)
            values = result.pop("values")
            result = jax.tree.map(lambda leaf: leaf.mean(0), result) | {"values": values}
        else:
            result = derived(x, y, index, keys)
        if program.gradients_inside:
            norm = (
                result["loss"]
                if program.gradients_inside == "by_loss"
                else optax.tree.norm(result["gradients"])
            )
            result["gradients"] = jax.tree.map(
                lambda g: (g / (1 + norm)).astype(g.dtype), result["gradients"]
            )
        values = result["values"]
        result["values"] = [values[output.value] for output in program.outputs]
        return result

    return jax.jit(body) if program.jit == "body" else body


class Mean(FromZeros):
    """The mean so far."""

    def update(self, state, update, index):
        return state + (update - state) / (index + 1).astype(state.real.dtype)


@dataclasses.dataclass(frozen=True)
class Decay(FromZeros):
    """A sum that decays by a value of the step."""

    rate: jax.Array

    def update(self, state, update, index):
        return state * self.rate.astype(state.dtype) + update


@dataclasses.dataclass(frozen=True)
class Onto:
    """A sum that starts from a value of the step."""

    start: jax.Array

    def state(self, n, a):
        return self.start

    def update(self, state, update, index):
        return state + update


OPERATIONS = {
    "Add": mpmd.Add,
    "Max": mpmd.Max,
    "Concat(0)": mpmd.Concat(0),
    "Concat(1)": mpmd.Concat(1),
    "Concat(-1)": mpmd.Concat(-1),
    "Last": Last(),
    "Mean": Mean(),
    "Decay": None,
}


def loop_of(program, params, batch, step_keys, sums):
    """What the loop over all microbatches gives."""
    body = body_of(program, params, step_keys)
    gradients = program.gradient_operation
    decay = Decay(jnp.tanh(jax.tree.leaves(params)[0].mean()))
    operations = {
        "loss": OPERATIONS[program.loss_operation],
        "values": [OPERATIONS[output.operation] or decay for output in program.outputs],
        "gradients": jax.tree.map(Onto, sums) if gradients == "Onto" else OPERATIONS[gradients],
        "input": mpmd.Concat(),
        "slope": mpmd.Add,
    }
    names = ["loss", "values", *{"grad": ["gradients"], "jvp": ["slope"], "forward": []}[program.mode]]
    operation = {name: operations[name] for name in names + ["input"] * program.input_gradient}
    schedule = make(program.schedule, len(program.stages), program.groups, program.chance)
    x, y = batch["x"], batch["y"]
    keys = {}
    if program.keys_in_batch:
        keys = {kind: jax.random.split(key, program.microbatches) for kind, key in step_keys.items()}
    if program.loop_over_index:

        def body_of_index(i):
            take = functools.partial(lax.dynamic_index_in_dim, index=i, axis=program.axis, keepdims=False)
            return body(take(x), take(y), i, {kind: key[i] for kind, key in keys.items()})

        return mpmd.treduce_i(body_of_index, program.microbatches, schedule, operation)
    index = jnp.arange(program.microbatches, dtype=jnp.int32)
    index = index if program.axis == 0 else jnp.broadcast_to(index, (BATCH, program.microbatches))
    return mpmd.treduce(
        lambda xs: body(xs["x"], xs["y"], xs["index"].reshape(-1)[0], xs["keys"]),
        {"x": x, "y": y, "index": index, "keys": keys},
        schedule,
        axis=program.axis,
        operation=operation,
    )
