"""Train steps whose layers are a scan over stacked weights, as data, drawn, and what they describe."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
from hypothesis import strategies as st
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, SGD, WIDTH, make_step, rows, squares, stack
from tests.support.random_programs.description import Described

POLICIES = {
    "": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
OPTIMIZERS = {
    "sgd": SGD,
    "clipped adam": CLIPPED_ADAM,
    "lamb": optax.lamb(1e-2),
    "if finite": optax.apply_if_finite(CLIPPED_ADAM, 3),
    "every second step": optax.MultiSteps(SGD, 2),
}
SCHEDULES = {"GPipe": mpmd.GPipe, "1F1B": mpmd.Std1F1B, "zero bubble": mpmd.ZeroBubble}


@dataclasses.dataclass(frozen=True, repr=False)
class ScannedProgram(Described):
    """A train step.

    Attributes:
      counts: the layers of each stage.
      spread: how the mark says so: ``every`` or ``num_stages``, where they fit, or ``counts``.
      axis: of the weights that counts layers.
      source: where stacked weights come from: they are ``arguments``, ``slices`` of a longer stack, or are
        stacked in the loss, from a ``list``.
      remat: what is under ``jax.checkpoint``: the ``body``, the ``layer`` in it, the ``scan``, the ``loss``.
      carried: what the scan carries besides: a ``count``, a ``total`` of squares, a ``key``, the ``input``.
      marked: the mark has all that is carried.
      stacks: each layer's mean is stacked, and part of the loss.
      shared: all layers add a weight that they share.
      penalty: of the stacked weights, outside of the scan.
      between: a mark of its own stands before the scan.
    """

    counts: tuple[int, ...]
    spread: str = "counts"
    schedule: str = "GPipe"
    axis: int = 0
    source: str = "arguments"
    remat: tuple[str, ...] = ()
    policy: str = ""
    reverse: bool = False
    unroll: int = 1
    carried: tuple[str, ...] = ()
    marked: bool = False
    stacks: bool = False
    shared: bool = False
    penalty: bool = False
    half: bool = False
    between: bool = False
    optimizer: str = "sgd"
    donate: bool = False

    @property
    def layers(self) -> int:
        return sum(self.counts)

    @property
    def stages(self) -> int:
        return len(self.counts) + self.between


def scanned_programs():
    subsets = [c for n in range(3) for c in itertools.combinations(("count", "total", "key", "input"), n)]
    remat = [c for n in range(3) for c in itertools.combinations(("layer", "body", "scan", "loss"), n)]
    return st.builds(
        ScannedProgram,
        counts=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
        spread=st.sampled_from(["counts", "every", "num_stages"]),
        schedule=st.sampled_from(list(SCHEDULES)),
        axis=st.sampled_from([0, 1]),
        source=st.sampled_from(["arguments", "arguments", "slices", "list"]),
        remat=st.sampled_from(remat),
        policy=st.sampled_from(list(POLICIES)),
        reverse=st.booleans(),
        unroll=st.sampled_from([1, 1, 2]),
        carried=st.sampled_from(subsets),
        marked=st.booleans(),
        stacks=st.booleans(),
        shared=st.booleans(),
        penalty=st.booleans(),
        half=st.sampled_from([False, False, True]),
        between=st.booleans(),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        donate=st.booleans(),
    )


def spread_of(program):
    counts, layers = program.counts, program.layers
    if program.spread == "every" and len(set(counts)) == 1:
        return {"every": counts[0]}
    few, more = divmod(layers, len(counts))
    if program.spread == "num_stages" and counts == (few + 1,) * more + (few,) * (len(counts) - more):
        return {"num_stages": len(counts)}
    return {"every": counts}


def state_of(program):
    """``params, optimizer state``."""
    layers = program.layers + 2 * (program.source == "slices")
    w = jax.random.normal(jax.random.key(1), (layers, WIDTH, WIDTH)) / 2
    stacked = {"w": w, "b": jnp.full((layers, WIDTH), 0.1)}
    if program.source == "list":
        params = {"layers": [rows(stacked, i) for i in range(layers)]}
    else:
        params = {"layers": jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, program.axis), stacked)}
    params |= {"shared": jnp.eye(WIDTH) / 8, "head": jnp.eye(WIDTH), "first": jnp.eye(WIDTH) / 2}
    return params, OPTIMIZERS[program.optimizer].init(params)


def stack_of(program, params):
    """The weights that are scanned over."""
    if program.source == "list":
        return stack(params["layers"])
    stacked = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, program.axis, 0), params["layers"])
    return rows(stacked, slice(1, -1)) if program.source == "slices" else stacked


def within(program, what, fun):
    if what not in program.remat:
        return fun
    return jax.checkpoint(fun, policy=POLICIES[program.policy])


def loss_of(program, params, x, y):
    stacked = stack_of(program, params)
    if program.half:
        stacked = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), stacked)
    more = {
        "count": jnp.int32(1),
        "total": jnp.float32(0),
        "key": jax.random.fold_in(jax.random.key(0), jnp.int32(100 * x[0, 0])),
        "input": x,
    }

    def layer(h, p):
        h = jnp.tanh(h @ jnp.float32(p["w"]) + jnp.float32(p["b"]))
        return jnp.sin(h + h @ params["shared"]) if program.shared else h

    def body(carry, p):
        h, more = carry
        h = within(program, "layer", layer)(h, p)
        more = dict(more)
        if "count" in more:
            h, more["count"] = h * (more["count"] % 3), more["count"] + 1
        if "total" in more:
            more["total"] += jnp.mean(h**2)
        if "key" in more:
            own, more["key"] = jax.random.split(more["key"])
            h = h * jax.random.bernoulli(own, 0.8, h.shape)
        if "input" in more:
            h = h + more["input"] / 4
        if program.marked:
            h, more = mpmd.mark_stage_end((h, more), **spread_of(program))
        else:
            h = mpmd.mark_stage_end(h, **spread_of(program))
        return (h, more), jnp.mean(h) if program.stacks else None

    def run(h, stacked):
        carry = h, {name: more[name] for name in program.carried}
        options = {"reverse": program.reverse, "unroll": min(program.unroll, program.layers)}
        return lax.scan(within(program, "body", body), carry, stacked, **options)

    h = x
    if program.between:
        h = mpmd.mark_stage_end(jnp.tanh(h @ params["first"]))
    (h, more), means = within(program, "scan", run)(h, stacked)
    loss = squares(h @ params["head"], y) + more.get("total", 0)
    if program.stacks:
        loss += jnp.sum(means * jnp.arange(1, program.layers + 1)) / 8
    if program.penalty:
        loss += 0.01 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params["layers"]))
    return loss


def scanned_step(program):
    """``state, *batch`` to ``state, (loss, gradients)``."""
    loss = within(program, "loss", functools.partial(loss_of, program))
    schedule = SCHEDULES[program.schedule](program.stages)
    return make_step(loss, schedule, OPTIMIZERS[program.optimizer])
