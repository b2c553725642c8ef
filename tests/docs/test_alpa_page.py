"""The steps of ``docs/alpa.md`` run, and compute what plain JAX does."""

import math

import jax
import numpy as np
import pytest

import mpmd
from tests.support.pages import blocks, run
from tests.support.parity import assert_close


@pytest.mark.slow
def test_the_blocks_compute_what_plain_jax_computes():
    before, *ours = blocks("alpa.md")
    assert "import alpa" in before  # which is not installed
    names = run(ours)
    marked = jax.jit(names["train_step"])(names["state"], names["batch"])
    assert_close(names["new_state"].params, marked.params)
    with names["uniform"] as mesh:
        assert_close(
            mpmd.jit(names["train_step"], mesh)(names["state"], names["batch"]).params, marked.params
        )

    assert_close(names["sharded_params"], marked.params)
    sizes = {
        name: [math.prod(g.values()) for g in names[name].launch["groups"]] for name in ("sharded", "on_part")
    }
    assert sizes == {"sharded": [2, 2], "on_part": [1, 1]}
    assert all(any(spec) for spec in kernels(names["sharded"].in_shardings[0].params))
    names["manual"].close()

    batch = {"x": np.ones((64, 16)), "y": np.zeros((64, 16))}
    unmarked = jax.jit(names["open_step"])(names["init"](jax.random.key(0)), batch)
    assert_close(names["params"], unmarked.params)
    assert names["choice"].candidate.num_microbatches == 16


def kernels(specs):
    return [layer["kernel"] for layer in specs["params"].values()]
