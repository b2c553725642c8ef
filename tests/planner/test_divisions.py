"""What the profile says that devices divide and sum, against what XLA does with the same specs."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.planner.profiling import profile_of
from mpmd.planner.profiling.microbatch import origin_of
from tests.support.collectives import collectives_of
from tests.support.divided_models import (
    HEADS,
    KEYS,
    MODELS,
    VOCABULARY,
    WIDTH,
    mean_square,
    state_of,
    step_of,
)

sys.path.append(str(Path(__file__).parents[2] / "examples"))

DEVICES = 2


def specs_of(profile, args, kind):
    """The profile's specs of one kind, as a pytree for ``in_shardings``."""
    leaves, treedef = jax.tree.flatten(args)
    dims = profile.specs[kind]
    specs = [P(*[None] * dims[i], kind) if i in dims else P() for i in range(len(leaves))]
    return jax.tree.unflatten(treedef, specs)


def sums_of(step, args, profile, kind):
    """What crosses devices, by executable of the loop, and outside; gathered bytes count half."""
    stages = len(profile.layers)
    devices = np.array(jax.devices()[: stages * DEVICES]).reshape(stages, DEVICES)
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage", kind)), "stage")
    specs = specs_of(profile, args, kind)
    loaded = mpmd.jit(step, mesh, in_shardings=specs).compile(*args)
    in_loop, outside = collectives_of(loaded, mesh)
    counted = {"all-reduce": 1.0, "all-gather": 0.5}

    def total(found):
        return sum(counted[collective.operation] * collective.nbytes for collective in found)

    return {name: total(found) for name, found in in_loop.items()}, sum(map(total, outside.values()))


@functools.cache
def profiled(name):
    """A model's step with its arguments and its profile."""
    step, args = MODELS[name]()
    return step, args, profile_of(step, args, {})


def said(profile, kind):
    """The same as the profile says it. Tasks of equal stages share an executable, which has one's name."""
    sums = {}
    for i, layer in enumerate(profile.layers):
        division = layer.divisions[kind]
        sums |= {f"fwd_{i}": division.forward.nbytes, f"bwd_{i}": division.backward.nbytes}
    return sums, sum(layer.divisions[kind].reduced_per_step for layer in profile.layers)


@pytest.mark.usual("decoder")
@pytest.mark.parametrize("name", MODELS)
def test_devices_sum_what_the_profile_says_for_weights(name):
    step, args, profile = profiled(name)
    expected, _ = said(profile, "model")
    actual, _ = sums_of(step, args, profile, "model")
    assert actual == {executable: expected[executable] for executable in actual}
    assert any(actual.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "convolutions"])
def test_devices_sum_what_the_profile_says_for_rows(name):
    step, args, profile = profiled(name)
    expected, per_step = said(profile, "data")
    actual, outside = sums_of(step, args, profile, "data")
    assert actual == {executable: expected[executable] for executable in actual}
    assert outside == per_step > 0


@pytest.mark.slow
def test_rows_that_sort_their_own_tokens_sum_only_gradients():
    step, args, profile = profiled("dropless")
    expected, per_step = said(profile, "data")
    actual, outside = sums_of(step, args, profile, "data")
    assert expected == {"fwd_0": 0, "bwd_0": actual["bwd_0"], "fwd_1": 0, "bwd_1": actual["bwd_1"]}
    assert actual["fwd_0"] < 0.02 * actual["bwd_0"]  # numbers of tokens
    assert profile.layers[0].divisions["data"].summed_gradients == actual["bwd_0"]
    assert outside == per_step > 0


def divided(profile, args, kind="model"):
    """By their path, the parameters that devices divide, and the dimension."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    prefix = "[0][0]"  # the parameters of the state
    return {
        paths[i].removeprefix(prefix): dim
        for i, dim in profile.specs[kind].items()
        if paths[i].startswith(prefix)
    }


@pytest.mark.slow
def test_finds_the_pairs_of_megatron():
    import gpt

    config = gpt.GPTConfig(num_layers=2, d_model=64, num_heads=4, seq_len=16, num_stages=2)
    state = state_of(lambda: gpt.init_params(jax.random.key(0), config))
    tokens = jax.ShapeDtypeStruct((2, 4, 16), jax.numpy.int32)
    args = state, (tokens, tokens)
    profile = profile_of(step_of(lambda p, batch: gpt.loss(p, *batch, config), 2), args, {})
    by_hand = jax.tree_util.tree_leaves_with_path(gpt.param_specs(config), is_leaf=lambda x: isinstance(x, P))
    pairs = {jax.tree_util.keystr(path): spec.index("model") for path, spec in by_hand if "model" in spec}
    # Vocabularies are divided, too (Shoeybi et al. 2019, section 3), which the example leaves out.
    assert divided(profile, args) == {**pairs, "['token_embedding']": 0, "['head']": 1}
    assert {layer.divisions["model"].largest for layer in profile.layers} == {config.num_heads}
    assert divided(profile, args, "sequence") == {"['position_embedding']": 0}
    assert not divided(profile, args, "data")


def test_heads_are_as_many_as_those_of_keys():
    _, args, profile = profiled("decoder")
    assert {layer.divisions["model"].largest for layer in profile.layers} == {KEYS}
    assert divided(profile, args)["['table']"] == 0, "entries of the vocabulary"
    assert profile.tied == (((0, 1), VOCABULARY * WIDTH * 4),)


def test_weights_that_are_fused_across_heads_stay_whole():
    _, args, profile = profiled("scanned")
    assert divided(profile, args) == {"['o']": 1, "['in']": 2, "['out']": 1}
    assert {layer.divisions["model"].largest for layer in profile.layers} == {HEADS}


def test_rows_are_found_where_the_step_cuts_its_batch():
    step, (state, batch) = MODELS["mlp"]()

    def cutting(state, rows):
        return step(state, mpmd.microbatches(rows, batch.shape[0]))

    rows = jax.ShapeDtypeStruct((batch.shape[0] * batch.shape[1], *batch.shape[2:]), batch.dtype)
    profile = profile_of(cutting, (state, rows), {})
    position = len(jax.tree.leaves(state))
    assert profile.specs["data"] == {position: 0}
    assert (profile.rows, profile.microbatch_rows) == (rows.shape[0], batch.shape[1])


def test_a_dimension_that_the_step_adds_comes_from_no_argument():
    jaxpr = jax.make_jaxpr(lambda x: jnp.broadcast_to(x, (3, 2)))(np.ones(2)).jaxpr
    assert origin_of(jaxpr.outvars[0], 0, jaxpr.eqns) is None


def test_rows_need_not_come_first():
    """The loss of each row does not depend on others, and that of each place does."""

    def loss(params, x):  # (length, rows, width)
        scores = jax.nn.softmax(jax.numpy.einsum("lrw,mrw->rlm", x, x @ params[0]))
        x = mpmd.mark_stage_end(jax.numpy.einsum("rlm,mrw->lrw", scores, x))
        return mean_square(x @ params[1])

    state = state_of(lambda: [jax.numpy.ones((WIDTH, WIDTH))] * 2)
    args = state, jax.ShapeDtypeStruct((2, 8, 4, WIDTH), jax.numpy.float32)
    profile = profile_of(step_of(loss, 2), args, {})
    position = len(jax.tree.leaves(state))
    assert profile.specs["data"] == {position: 2}
    assert profile.specs["sequence"] == {position: 1}
    assert profile.microbatch_rows == 4
    assert [layer.divisions["data"].forward.nbytes for layer in profile.layers] == [0, 0]
    assert profile.layers[0].divisions["sequence"].forward.nbytes > 0
