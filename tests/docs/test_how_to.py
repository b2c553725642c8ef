"""The blocks of how-to pages run, and what the pages say of them is so."""

import re

import jax
import numpy as np
import pytest

import mpmd
from mpmd.simulate import Costs, simulate
from tests.support.pages import DOCS, blocks, run

PAGE = "choose_stages_and_microbatches"


def text(page):
    """A page, each paragraph on a line."""
    return " ".join((DOCS / "how_to" / f"{page}.md").read_text().split())


@pytest.mark.slow  # `make docs` runs the page, too
def test_stages_and_microbatches(capsys):
    run(blocks(f"how_to/{PAGE}.md"))
    printed = capsys.readouterr().out
    shares = re.search(r"leave (\d+)% idle, and twice as many leave (\d+)%", text(PAGE)).groups()
    bubbles = [simulate(mpmd.Std1F1B(4).tasks(m)).bubble for m in (16, 32)]
    assert shares == tuple(f"{100 * bubble:.0f}" for bubble in bubbles)
    (ratio,) = re.findall(r"([\d.]+) times as long\.", text(PAGE))
    slow = Costs(tasks={("fwd", 3): 1.5, ("bwd", 3): 3})
    steps = [simulate(mpmd.Std1F1B(4).tasks(16), costs).makespan for costs in (Costs(), slow)]
    assert ratio == f"{steps[1] / steps[0]:.2f}"
    makespans = [float(each) for each in re.findall(r"^ *\d+ +\d+ +([\d.]+) +[\d.]+%$", printed, re.M)]
    assert makespans.index(min(makespans)) not in (0, len(makespans) - 1)  # too few, and too many


@pytest.fixture
def cells():
    """The blocks of the page on batches. The first makes devices, where there are none yet."""
    return blocks("how_to/input_pipelines.md")


@pytest.mark.slow
def test_input_pipelines(cells, capsys, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    names = run(cells)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "True"
    compiled = [line.partition("lengths ")[2] for line in printed if "compiled for" in line]
    exact, padded, bucketed, by_grain = map(eval, compiled)
    assert len({*exact}) == len(exact) > 3
    assert padded == by_grain == [64]
    assert sorted(bucketed) == [32, 48, 64]
    plain = jax.jit(names["train_step"])
    params, losses = names["init_params"](jax.random.key(0)), []
    for batch in names["epoch"](0):
        params, loss = plain(params, *names["stacked"](batch, 64))
        losses.append(loss)
    np.testing.assert_allclose(names["to_longest"], losses, rtol=1e-5)
