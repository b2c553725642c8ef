"""The blocks of ``docs/profiles.md`` run, and compute what plain JAX does."""

import re
from pathlib import Path

import jax
import numpy as np

import mpmd
from mpmd.attribution.gaps import Causes
from tests.support.parity import assert_close

TEXT = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_profile_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS:
        exec(block, names)
    state = [np.eye(64, dtype="float32")] * 2
    for _ in range(6):
        state, loss = jax.jit(names["train_step"])(state, names["xs"])
    with names["mesh"]:
        assert_close((names["params"], names["loss"]), (state, loss))
    assert capsys.readouterr().out.startswith("a step of ")
    assert mpmd.Profile.load("step.json") == names["profile"]
    assert "<html" in Path("step.html").read_text()


def test_every_cause_is_explained():
    explained = set(re.findall(r"^\| ([a-z ]+) \|", TEXT, re.MULTILINE)) - {"cause"}
    assert explained == {name.replace("_", " ") for name in Causes._fields}
