"""The described step: what is around its loop, its arguments and how they are sharded."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support.models import stack
from tests.support.random_programs.layers import BATCH, WIDTH
from tests.support.random_programs.loop import KEYS, joined, loop_of, prepared, trainable_of

# Large epsilons, because the first steps of Adam make noise of gradients near zero.
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, eps=0.1, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=0.1)),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.01, 5)),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    "every_second": optax.MultiSteps(optax.sgd(0.1), 2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "flat": optax.flatten(optax.adam(1e-2, eps=0.1)),
}


def updated(program, params, opt_state, gradients):
    """The parameters and the optimizer's state after the gradients."""
    trainable = trainable_of(program, params)

    def update(trainable, opt_state):
        updates, opt_state = OPTIMIZERS[program.optimizer].update(gradients, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state

    if program.jit == "update":
        update = jax.jit(update)
    old = (trainable, opt_state)
    ok = jnp.isfinite(optax.tree.norm(gradients)) if program.update else True
    match program.update:
        case "cond":
            new = lax.cond(ok, update, lambda *old: old, *old)
        case "where":
            new = jax.tree.map(lambda a, b: jnp.where(ok, a, b), update(*old), old)
        case "twice":
            new = lax.fori_loop(0, 2, lambda i, old: update(*old), old)
        case _:
            new = update(*old)
    return joined(program, params, new[0]), new[1]


def step_of(program):
    """The train step: ``state, batch`` to the next state and what else it returns."""
    constant = jnp.arange(3.0)

    def step(given, batch):
        state = dict(given)
        keys = {}
        for kind in KEYS:
            if kind in state:
                state[kind], keys[kind] = jax.random.split(state[kind])
        if "inputs" in program.before:
            batch = batch | {"x": jnp.tanh(batch["x"] - batch["x"].mean())}
        results = {}
        for one in loops_of(program):
            loop = functools.partial(loop_of, one)
            loop = jax.jit(loop) if program.jit == "loop" else loop
            weights = prepared(program.before, state["params"])
            found = loop(weights, batch, keys, state.get("sums"))
            if program.mode == "grad":
                train(program, state, found["gradients"])
            results = found if one is program else found | {"first": results}
        leaves = jax.tree.leaves(state["params"])
        others = {
            "literal": 1.5,
            "constant": constant,
            "batch": batch,
            "given": given,
            "weight": leaves[0],
            "prepared": weights,
            "twice": [results["loss"], results["loss"]],
            "none": None,
            "sum_of_all": sum(jnp.sum(jnp.float32(leaf)) for leaf in leaves),
        }
        return state, results | {name: others[name] for name in program.results}

    return step


def loops_of(program):
    """The program, and what it is in its second loop, if it has one."""
    if program.again is None:
        return [program]
    schedule, groups = program.again
    again = dataclasses.replace(program, schedule=schedule, groups=groups, chance=program.chance + 1)
    return [program, again]


def train(program, state, gradients):
    """Updates the state in place."""
    if program.gradient_operation == "Onto":
        state["sums"] = jax.tree.map(lambda g: g * 0.5, gradients)
    if program.gradient_operation.startswith("Concat"):
        gradients = jax.tree.map(lambda g: g.sum(0), gradients)
    state["params"], state["optimizer"] = updated(program, state["params"], state["optimizer"], gradients)


def arguments_of(program):
    """The first state, and the batch."""
    numbers = np.random.default_rng(0)

    def weight(shape, dtype):
        return jnp.asarray(numbers.normal(size=shape) / 2, dtype)

    params = [{"w": weight((WIDTH, WIDTH), dtype), "b": weight(WIDTH, dtype)} for dtype in program.weights]
    if program.stacked:
        params = stack(params)
    state = {"params": params}
    if program.mode == "grad":
        trainable = trainable_of(program, params)
        state["optimizer"] = OPTIMIZERS[program.optimizer].init(trainable)
        if program.gradient_operation == "Onto":
            state["sums"] = jax.tree.map(jnp.zeros_like, trainable)
    kinds = {side.kind for side in program.sides}
    state |= {"key": jax.random.key(1)} if "key" in kinds else {}
    state |= {"raw_key": jax.random.PRNGKey(2)} if "raw_key" in kinds else {}
    x = np.float32(numbers.normal(size=(program.microbatches, BATCH, WIDTH)))
    y = np.int32(numbers.integers(WIDTH, size=(program.microbatches, BATCH)))
    return state, {name: jnp.asarray(np.moveaxis(a, 0, program.axis)) for name, a in {"x": x, "y": y}.items()}


SUBMESHES = {
    "": {},
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "fsdp_once": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "both": {"data": 2, "tensor": 2},
}

ONCE = {"partial_sums": "all", "gather": "step"}
"""For ``fsdp_once``: what is reduced and gathered in every microbatch otherwise."""


def options_of(program, state, batch):
    """How the step is sharded: options of ``mpmd.jit``."""
    once = ONCE if program.submesh == "fsdp_once" else {}
    return {"in_specs": specs_of(program, state, batch), **once}


def axes_of(program):
    """The axes of a group's devices."""
    return SUBMESHES[program.submesh]


def specs_of(program, state, batch):
    """The specs of the arguments, or ``None`` for groups of one device."""
    axes = axes_of(program)
    if not axes:
        return None

    def of_state(leaf):
        shape = jnp.shape(leaf)
        if shape[-1:] != (WIDTH,):
            return P()
        if "tensor" in axes:
            return P(*[None] * (len(shape) - 1), "tensor")
        dimension = max(0, len(shape) - 2)
        return P(*[None] * dimension, "fsdp") if "fsdp" in axes and shape[dimension] % 2 == 0 else P()

    across = next((axis for axis in axes if axis in ("data", "fsdp")), None)
    of_batch = P(across) if program.axis else P(None, across)
    return jax.tree.map(of_state, state), jax.tree.map(lambda leaf: of_batch, batch)
