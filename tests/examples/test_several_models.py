"""Examples of several models, each on a part of the mesh, in process and on Ray."""

import re

import pytest

from tests.examples.test_examples import run_example

EACH_WHERE = pytest.mark.parametrize("where", ["", "--ray"], ids=["here", "ray"])


@pytest.mark.slow
@EACH_WHERE
def test_distillation(where):
    printed = run_example(f"distillation --steps 4 {where}")
    assert "teacher: groups [0, 1, 2]" in printed and "student: groups [3, 4]" in printed
    for name in ("teacher", "student", "losses of the teacher", "losses of the student"):
        assert f"\n{name}: largest relative error of a leaf" in printed
    first, last = map(float, re.search(r"divergence .*: (\S+) nats, then (\S+)", printed).groups())
    assert last < first


@pytest.mark.slow
@EACH_WHERE
def test_encoder_and_model(where):
    printed = run_example(f"encoder_and_model --steps 4 {where}")
    assert "encoder: weights on groups [0, 1]" in printed
    assert "model: weights on groups [2, 3, 4, 5]" in printed
    assert "parameters and moments: largest relative error of a leaf" in printed
    first, last = map(float, re.search(r"captions: (\S+) nats, then (\S+)", printed).groups())
    assert last < first


@pytest.mark.slow
@EACH_WHERE
def test_grpo(where):
    printed = run_example(f"grpo --steps 12 {where}")
    assert len(re.findall(r"^step \d+: reward ", printed, re.MULTILINE)) == 12
    assert "the sampler's scores: largest relative error of a leaf" in printed
    at_work = re.search(r"at work for (\S+) ms, the sampler in (\S+) ms", printed)
    assert float(at_work[2]) > 0
    first, last = map(
        float, re.search(r"first third of steps (\S+), of the last third (\S+)", printed).groups()
    )
    assert last > first
