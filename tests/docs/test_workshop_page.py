"""The blocks of ``docs/workshop.md`` run in their order, and compute what plain JAX does."""

import re
from pathlib import Path

import jax
import pytest

import mpmd
from mpmd.planner.simplicity import may_be_as_fast
from tests.support.parity import assert_close

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "workshop.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(blocks):
    names = {}
    for block in blocks:
        exec(block, names)
    return names


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


def test_names_that_the_page_takes_from_the_library_exist():
    for name in re.findall(r"`(?:\w+ = )?mpmd\.(\w+)", TEXT):
        assert hasattr(mpmd, name), name


@pytest.mark.parametrize("link", re.findall(r"\]\((\w+\.md)#?", TEXT))
def test_pages_that_it_links_exist(link):
    assert (ROOT / "docs" / link).exists()


@pytest.mark.parametrize("example", re.findall(r"examples/\w+\.py", TEXT))
def test_examples_that_it_names_exist(example):
    assert (ROOT / example).exists()
