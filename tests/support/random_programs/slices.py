"""Train steps whose loss goes over slices of the sequence, as data, drawn, and what they describe."""

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
from tests.support.models import init, keys, make_step
from tests.support.random_programs.description import Described
from tests.support.random_programs.outside import OPTIMIZERS
from tests.support.random_programs.schedules import Shuffled

WIDTH, ROWS = 4, 2


def _two_stages_per_group(stages, slices):
    return mpmd.Seq1F1B(stages, slices, mpmd_dim=None if stages % 2 else stages // 2)


SCHEDULES = {
    "slices": mpmd.Seq1F1B,
    "eager": functools.partial(mpmd.Seq1F1B, eager=True),
    "split": functools.partial(mpmd.Seq1F1B, split_backward=True),
    "two stages per group": _two_stages_per_group,
    "GPipe": mpmd.GPipe,
    "shuffled": lambda stages, slices: Shuffled(stages, max(1, stages - 1), chance=0, slices=slices),
    "whole": lambda stages, slices: mpmd.Std1F1B(stages),
}
"""Schedules by name, of the numbers of stages and slices."""

LAYERS = ("attention", "state", "window", "plain")


@dataclasses.dataclass(frozen=True, repr=False)
class SlicedProgram(Described):
    """A train step.

    Attributes:
      sizes: the tokens of each slice.
      stages: for each stage its layers: ``attention`` to all slices before, a recurrent ``state``, a
        ``window`` that reaches into the slice before, or ``plain``, which hands nothing on.
      skips: the slices right before a slice that its attention does not read.
      remat: what is under ``jax.checkpoint``: each ``layer``, or the ``loss``.
      cut: the gradient stops between slices.
      marked: the mark also has what the layer before hands on, which the next stage reads.
      tied: the head is the embedding.
      shared: all layers add a weight that they share.
      noise: a mask drawn for each slice and layer.
      penalty: each slice adds a loss of each stage, which goes through the marks.
      weights: what weighs tokens in the mean: the ``batch``, the ``model`` or nothing.
      half: activations are bfloat16.
      last_mark: a mark stands behind the last stage, too.
    """

    sizes: tuple[int, ...]
    stages: tuple[tuple[str, ...], ...]
    schedule: str = "slices"
    microbatches: int = 1
    skips: int = 0
    remat: str = ""
    cut: bool = False
    marked: bool = False
    tied: bool = False
    shared: bool = False
    noise: bool = False
    penalty: bool = False
    weights: str = ""
    half: bool = False
    last_mark: bool = False
    optimizer: str = "sgd"
    donate: bool = False

    @property
    def bounds(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.sizes))

    @property
    def length(self) -> int:
        return sum(self.sizes)

    def make_schedule(self) -> mpmd.Schedule:
        """That of its name; a model of one stage is not cut."""
        name = self.schedule if len(self.stages) > 1 else "whole"
        return SCHEDULES[name](len(self.stages), len(self.sizes))


def sliced_programs():
    rarely = st.sampled_from([False, False, False, True])
    layers = st.lists(st.sampled_from(LAYERS), min_size=1, max_size=2).map(tuple)
    return st.builds(
        SlicedProgram,
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
        stages=st.lists(layers, min_size=1, max_size=4).map(tuple),
        schedule=st.sampled_from(list(SCHEDULES)),
        microbatches=st.integers(1, 4),
        skips=st.sampled_from([0, 0, 1]),
        remat=st.sampled_from(["", "", "layer", "loss"]),
        cut=rarely,
        marked=rarely,
        tied=rarely,
        shared=rarely,
        noise=rarely,
        penalty=rarely,
        weights=st.sampled_from(["", "", "batch", "model"]),
        half=rarely,
        last_mark=rarely,
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        donate=st.booleans(),
    )


def state_of(program):
    """``params, optimizer state``."""
    embed, *of_layers = keys(1 + sum(map(len, program.stages)))

    def matrices(key):
        return list(jax.random.normal(key, (4, WIDTH, WIDTH)) / 2)

    numbers = iter(of_layers)
    params = {
        "embed": jax.random.normal(embed, (5, WIDTH)),
        "stages": [[matrices(next(numbers)) for _ in stage] for stage in program.stages],
        "shared": jnp.eye(WIDTH) / 8,
        "weigh": jnp.linspace(-1, 1, WIDTH),
    }
    if not program.tied:
        params["head"] = jax.random.normal(embed, (WIDTH, 5))
    return init(params, OPTIMIZERS[program.optimizer])


def data_of(program):
    """Tokens and weights of microbatches."""
    tokens, weights = keys(2)
    shape = (program.microbatches, ROWS, program.length)
    return jax.random.randint(tokens, shape, 0, 5), 0.1 + jax.random.uniform(weights, shape)


def _attention(program, p, h, chunks):
    q, k, v = (h @ w for w in p[:3])
    chunks = [*(chunks or []), (k, v)]
    read = [chunks[-1], *chunks[-2 - program.skips :: -1]][::-1] if len(chunks) > 1 else chunks
    keys, values = (jnp.concatenate(each, 1) for each in zip(*read, strict=True))
    before = keys.shape[1] - q.shape[1]
    seen = jnp.tri(q.shape[1], keys.shape[1], before, dtype=bool)
    scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", q, keys), -1e4)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), values), chunks


def _state(program, p, h, state):
    decay = jax.nn.sigmoid(h @ p[0])
    state = jnp.zeros_like(h[:, 0]) if state is None else state

    def following(state, token):
        state = token[0] * state + (1 - token[0]) * token[1]
        return state, state

    taken = jax.tree.map(lambda each: jnp.moveaxis(each, 1, 0), (decay, h @ p[1]))
    state, states = lax.scan(following, state, taken)
    return jnp.moveaxis(states, 0, 1), state


def _window(program, p, h, last):
    last = jnp.zeros_like(h[:, :1]) if last is None else last
    padded = jnp.concatenate([last, h], 1)
    return h @ p[0] + padded[:, :-1] @ p[1], h[:, -1:]


def _plain(program, p, h, carried):
    return h @ p[0], carried


KINDS = {"attention": _attention, "state": _state, "window": _window, "plain": _plain}


def _layer(program, kind, number, p, shared, h, carried, key):
    made, carried = KINDS[kind](program, p, h, carried)
    if program.shared:
        made = made + h @ shared
    if program.noise:
        made = made * jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, made.shape)
    return h + jnp.tanh(made @ p[3]), carried


def loss_of(program, params, tokens, weights):
    """The loss of a microbatch."""
    names = [kind for stage in program.stages for kind in stage]
    carried = [None] * len(names)
    dtype = jnp.bfloat16 if program.half else jnp.float32
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    head = params["embed"].T if program.tied else params["head"]
    key = jax.random.fold_in(jax.random.key(0), tokens[0, 0])
    total, weight, penalty = 0.0, 0.0, 0.0
    pieces = mpmd.slices((tokens, jnp.roll(tokens, -1, -1), weights), program.bounds)
    for index, (x, y, of_tokens) in enumerate(pieces):
        h, extra, number = params["embed"][x], jnp.float32(0), 0
        for stage, layers in enumerate(params["stages"]):
            for p in layers:
                before = jax.tree.map(lax.stop_gradient, carried[number]) if program.cut else carried[number]
                fun = lambda *args, n=number: _layer(program, names[n], n, *args)  # noqa: E731
                fun = jax.checkpoint(fun) if program.remat == "layer" else fun
                own = jax.random.fold_in(key, index)
                h, carried[number] = fun(p, params["shared"], h, before, own)
                number += 1
            extra = extra + jnp.mean(jnp.float32(h) ** 2)
            if stage < len(program.stages) - 1 or program.last_mark:
                handed_on = carried[number - 1] if program.marked else None
                h, extra, handed_on = mpmd.mark_stage_end((h, extra, handed_on))
                extra += sum(jnp.mean(jnp.float32(leaf)) for leaf in jax.tree.leaves(handed_on))
        logits = jnp.float32(h @ head)
        cost = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        if program.weights == "model":
            of_tokens = jax.nn.sigmoid(jnp.float32(h @ params["weigh"]))
        elif not program.weights:
            of_tokens = jnp.ones_like(cost)
        total, weight, penalty = total + (cost * of_tokens).sum(), weight + of_tokens.sum(), penalty + extra
    return total / weight + (0.01 * penalty if program.penalty else 0.0)


def sliced_step(program):
    """``state, *batch`` to ``state, (loss, gradients)``."""
    loss = functools.partial(loss_of, program)
    loss = jax.checkpoint(loss) if program.remat == "loss" else loss
    return make_step(loss, program.make_schedule(), OPTIMIZERS[program.optimizer])
