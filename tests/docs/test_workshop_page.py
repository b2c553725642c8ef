"""The blocks of ``docs/workshop.md`` run in their order, and compute what plain JAX does."""

import jax

from tests.support.pages import blocks, run
from tests.support.parity import assert_close


def test_the_step_in_three_dimensions_computes_what_plain_jax_computes():
    names = run(blocks("workshop.md"))
    expected = jax.jit(names["train_step"])(names["params"], names["x"], names["y"])
    with names["mesh"]:
        assert_close((names["trained"], names["value"]), expected)
