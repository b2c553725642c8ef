"""A line in a library is named behind the user's line that leads to it."""

import importlib
import logging
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import CompileError
from tests.support.models import planned

LIBRARY = """
import jax, mpmd

def block(w, x):
    return x + jax.nn.gelu(x @ w) @ w

jitted = jax.jit(block)
rematerialised = jax.checkpoint(block)

def model(params, x):
    for w in params:
        x = block(w, x)
    return x

def marked_in_a_loop(w, x):
    return jax.lax.while_loop(lambda x: x[0, 0] > 2, lambda x: mpmd.mark_stage_end(block(w, x)), x)
"""
HERE, THERE = r"\S*test_library_lines\.py:\d+ \(.*\)", r"\[blocks/__init__\.py:\d+ \(block\)\]"


@pytest.fixture(params=["site-packages", "dist-packages"])
def library(request, tmp_path, monkeypatch):
    folder = tmp_path / request.param
    (folder / "blocks").mkdir(parents=True)
    (folder / "blocks" / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("blocks")
    del sys.modules["blocks"]


PARAMS, X = [np.ones((4, 4), np.float32)] * 4, np.ones((8, 4), np.float32)


def lowered(loss):
    def step(params, x):
        return mpmd.value_and_grad(loss, num_microbatches=2, schedule=mpmd.Std1F1B(2))(params, x)

    return planned(step, PARAMS, X)


@pytest.mark.usual("site-packages-block", "site-packages-jitted", "site-packages-rematerialised")
@pytest.mark.parametrize("kind", ["block", "jitted", "rematerialised"])
def test_stages_end_at_the_users_line(library, kind, caplog):
    def loss(params, x):
        for w in params:
            x = getattr(library, kind)(w, x)
        return jnp.mean(x)

    with caplog.at_level(logging.INFO, logger="mpmd"):
        step = lowered(loss)
    for text in (caplog.text, str(step.report()), str(mpmd.explain(step))):
        assert re.search(rf"stage 0 ends after layer 2 of 4 at {HERE}", text), text
    assert kind != "block" or re.search(THERE, caplog.text)


def test_a_model_in_a_library_alone(library, caplog):
    with caplog.at_level(logging.INFO, logger="mpmd"):
        lowered(lambda params, x: jnp.mean(library.model(params, x)))
    assert re.search(rf"at {HERE} {THERE}", caplog.text), caplog.text


@pytest.mark.usual("site-packages")
def test_errors_name_the_users_line(library):
    with pytest.raises(
        CompileError, match=rf"mark_stage_end at {HERE} \[blocks/__init__\.py:\d+ .* while loop"
    ):
        lowered(lambda params, x: jnp.mean(jax.lax.stop_gradient(library.marked_in_a_loop(params[0], x))))
