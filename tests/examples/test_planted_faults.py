"""The Workshop examples fail if a gradient of a weight, a stage or a microbatch is off by a thousandth."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import mpmd

SLIGHTLY = 1e-3
FAULTS = ["weight", "stage", "microbatch"]
TRANSFORMER = (
    "--strategies planted --data 1 --model 1 --layers 2 --hidden 16 --heads 2 --seq-len 8 "
    "--microbatches 2 --steps 1"
)
STRATEGIES = "--strategies planted --layers 3 --d-model 16 --seq-len 8 --heads 2 --simulate 1"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")


def wrong(gradients, factor, part):
    """The gradients whose path has ``part`` in it, times ``factor``."""
    return jax.tree.map_with_path(
        lambda path, leaf: leaf * factor if part in jax.tree_util.keystr(path) else leaf, gradients
    )


PARTS = {"weight": "['mlp_in']['kernel']", "stage": "['layers'][1]", "microbatch": ""}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_transformer(examples, monkeypatch, fault):
    import workshop_transformer as workshop

    treduce, pipelined = mpmd.treduce, workshop.pipelined

    def faulty_treduce(fun, xs, **options):
        num_microbatches = len(jax.tree.leaves(xs)[0])
        factors = jnp.ones(num_microbatches).at[0 if fault == "microbatch" else slice(None)].add(SLIGHTLY)

        def faulty(microbatch):
            loss, gradients = fun(microbatch[0])
            return loss, wrong(gradients, microbatch[1], PARTS[fault])

        return treduce(faulty, (xs, factors), **options)

    def faulty_pipelined(*args):
        with monkeypatch.context() as patch:
            patch.setattr(mpmd, "treduce", faulty_treduce)
            return pipelined(*args)

    monkeypatch.setitem(workshop.STRATEGIES, "planted", workshop.Strategy())
    workshop.main(TRANSFORMER.split())
    monkeypatch.setattr(workshop, "pipelined", faulty_pipelined)
    with pytest.raises(AssertionError, match=r"parameters and moments: relative error of \["):
        workshop.main(TRANSFORMER.split())


@jax.custom_vjp
def with_wrong_gradient(x, factor):
    return x


with_wrong_gradient.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor))
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_strategies(examples, monkeypatch, fault):
    import workshop_strategies as workshop

    args = workshop.parse_arguments(["--strategies", "data", *STRATEGIES.split()[2:]])
    first_row = workshop.make_batch(args)[0][0]
    part = {"weight": "['blocks'][1]['mlp_in']", "stage": "['blocks'][1]", "microbatch": ""}[fault]

    def plant(loss):
        def planted(params, tokens, targets):
            here = True if fault != "microbatch" else jnp.all(tokens[0] == first_row)
            factor = 1 + SLIGHTLY * jnp.float32(here)
            paths = jax.tree.map_with_path(lambda path, leaf: part in jax.tree_util.keystr(path), params)
            params = jax.tree.map(
                lambda x, is_wrong: with_wrong_gradient(x, factor) if is_wrong else x, params, paths
            )
            return loss(params, tokens, targets)

        return planted

    strategy = workshop.Strategy(workshop.STAGES_1F1B, plant)
    monkeypatch.setitem(workshop.STRATEGIES, "planted", strategy)
    with pytest.raises(AssertionError, match=r"planted: parameters and moments: relative error of \["):
        workshop.main(STRATEGIES.split())
