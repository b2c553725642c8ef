"""How arrays in parts are explained."""

import pytest

import mpmd
from tests.support.models import SGD, batch, init, make_step
from tests.support.programs.scanned_layers import model, stacked


@pytest.fixture(scope="module")
def explanation():
    step = make_step(model(), mpmd.Std1F1B(3), SGD)
    mesh = mpmd.AbstractMpmdMesh({"stage": 3}, "stage")
    return mpmd.explain(mpmd.jit(step, mesh).lower(init(stacked()), *batch()))


def test_the_same_part_of_several_stacks_is_one_line(explanation):
    lines = str(explanation).splitlines()
    (line,) = (line for line in lines if line.startswith("args[0][0]['layers'][2:4]"))
    assert line.split() == ("args[0][0]['layers'][2:4] 2 160 B 1 fwd_1, bwd_1, after_0 after_0".split())


def test_a_part_is_explained_like_a_leaf(explanation):
    text = str(explanation.leaf("args[0][0]['layers']['w'][2:4]"))
    assert "float32[2,4,4], 128 B, on group 1" in text and "fwd_1" in text
    with pytest.raises(ValueError, match=r"3 leaves have .* in their names; say more: .*\[0:2\]"):
        explanation.leaf("args[0][0]['layers']['w']")
