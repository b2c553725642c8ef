"""The blocks of ``docs/profiles.md`` run, and compute what plain JAX does."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from mpmd.attribution.gaps import Causes
from tests.support.models import batch, mse, weights
from tests.support.pages import DOCS, blocks, run
from tests.support.parity import assert_close, mesh_of

TEXT = (DOCS / "profiles.md").read_text()


def train_step(params, xs):
    loss, grads = mpmd.treduce(
        lambda x: jax.value_and_grad(mse)(params, x, jnp.sin(x)),
        xs,
        schedule=mpmd.Std1F1B(2),
        operation=mpmd.Mean,
    )
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def test_the_profile_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    state, (xs, _) = jax.tree.map(np.asarray, weights(2)), batch()
    with mesh_of(2) as mesh:
        step = mpmd.jit(train_step, mesh, donate_argnums=0).compile(state, xs)
        names = run(blocks("profiles.md"), step=step, params=state, xs=xs)
        for _ in range(6):
            state, loss = jax.jit(train_step)(state, xs)
        assert_close((names["params"], names["loss"]), (state, loss))
    assert capsys.readouterr().out.startswith("a step of ")
    assert mpmd.Profile.load("step.json") == names["profile"]
    assert "<html" in Path("step.html").read_text()


def test_every_cause_is_explained():
    explained = set(re.findall(r"^\| ([a-z ]+) \|", TEXT, re.MULTILINE)) - {"cause"}
    assert explained == {name.replace("_", " ") for name in Causes._fields}
