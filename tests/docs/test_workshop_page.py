"""The blocks of ``docs/workshop.md`` run in their order, and compute what plain JAX does."""

import jax
import pytest

from mpmd.planner.reasons import may_be_as_fast
from tests.support.pages import blocks, run
from tests.support.parity import assert_close

BLOCKS = blocks("workshop.md")


def test_the_step_in_three_dimensions_computes_what_plain_jax_computes():
    names = run(block for block in BLOCKS if "mpmd.plan" not in block)
    expected = jax.jit(names["train_step"])(names["params"], names["x"], names["y"])
    with names["mesh"]:
        assert_close((names["trained"], names["value"]), expected)


@pytest.mark.slow
def test_the_block_by_hand_computes_the_same():
    names = run(BLOCKS[:2])
    weights, x, specs = names["params"][0], names["x"], names["SPECS"]
    by_hand = jax.shard_map(
        names["block_of_device"],
        mesh=jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]),
        in_specs=(specs, jax.P()),
        out_specs=jax.P(),
    )
    assert_close(jax.jit(by_hand)(weights, x), names["block"](weights, x))


@pytest.mark.slow
def test_with_less_memory_another_strategy_is_selected():
    names = run(block for block in BLOCKS if "mesh" not in block)
    roomy, tight = names["roomy"].best, names["tight"].best
    assert tight.candidate != roomy.candidate
    assert tight.prediction.memory.total <= 0.7 * roomy.prediction.memory.total
    assert may_be_as_fast(roomy.prediction, tight.prediction)
