"""The steps of ``docs/alpa.md`` run, and compute what plain JAX does."""

import jax
import pytest

from tests.support.pages import blocks, run
from tests.support.parity import assert_close


@pytest.mark.slow
def test_the_blocks_compute_what_plain_jax_computes():
    names = run(blocks("alpa.md"))
    marked = jax.jit(names["train_step"])(names["state"], names["batch"])
    assert_close(names["new_state"].params, marked.params)
    names["manual"].close()

    unmarked = jax.jit(names["open_step"])(names["state"], names["batch"])
    assert_close(names["params"], unmarked.params)
    assert names["choice"].candidate.num_microbatches == 16
