"""Every block of ``docs/recipes.md`` runs, in a pipeline and in plain JAX, to the same numbers."""

import re
import warnings
from pathlib import Path

import jax
import pytest

import mpmd
from tests.support.parity import assert_close, mesh_of

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"### (.*?)\n(?:(?!###).)*?```python\n(.*?)```", TEXT, re.DOTALL)
COMMON, _ = re.findall(r"```python\n(.*?)```", TEXT.partition("## Model libraries")[0], re.DOTALL)


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


def test_no_block_is_left_out():
    assert len(BLOCKS) + 2 == TEXT.count("```python")


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_recipe_computes_what_plain_jax_computes(mesh, name, block):
    namespace = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what libraries take from JAX
        exec(COMMON + block, namespace)
        step, arguments = namespace["train_step"], namespace["arguments"]
        expected = jax.jit(step)(*arguments)
    compiled = mpmd.jit(step, mesh).compile(*arguments)
    assert_close(compiled(*arguments), expected)
    assert {program.mpmd_idx for program in compiled.plan.programs if program.runs} == {0, 1}
