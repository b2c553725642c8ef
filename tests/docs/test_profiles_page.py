"""The blocks of ``docs/profiles.md`` run, and compute what plain JAX does."""

import re
from pathlib import Path

import jax
import numpy as np

import mpmd
from mpmd.attribution.gaps import Causes
from tests.support.pages import DOCS, blocks, run
from tests.support.parity import assert_close

TEXT = (DOCS / "profiles.md").read_text()


def test_the_profile_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run(blocks("profiles.md"))
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
