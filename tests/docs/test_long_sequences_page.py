"""The page on long sequences: its step trains as plain JAX, and its tables are those of the simulator."""

import itertools

import jax
import numpy as np
import pytest

import mpmd
from mpmd.simulate import Costs, simulate
from tests.support.pages import DOCS, blocks, run
from tests.support.parity import assert_close, mesh_of

TEXT = (DOCS / "long_sequences.md").read_text()
GROUPS, SLICES = 8, 8


def table_after(heading):
    """The cells of the first table after a text, without its heading and the names of its columns."""
    lines = TEXT[TEXT.index(heading) :].splitlines()
    rows = itertools.takewhile(
        lambda line: line.startswith("|"), itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    )
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows][2:]


WIDTH, VOCABULARY, LENGTH = 16, 32, 64


def init_params(key):
    keys = iter(jax.random.split(key, 11))

    def dense(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    def layer():
        return {
            "qkv": dense(WIDTH, 3 * WIDTH),
            "out": dense(WIDTH, WIDTH),
            "up": dense(WIDTH, 4 * WIDTH),
            "down": dense(4 * WIDTH, WIDTH),
        }

    return {
        "tokens": dense(VOCABULARY, WIDTH),
        "positions": dense(LENGTH, WIDTH),
        "layers": [layer(), layer()],
        "head": dense(WIDTH, VOCABULARY),
    }


@pytest.mark.slow
def test_the_step_trains_as_plain_jax():
    names = run(blocks("long_sequences.md"))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, LENGTH))
    arguments = init_params(jax.random.key(0)), tokens, np.roll(tokens, -1, axis=1)
    with mesh_of(2) as mesh:
        actual = mpmd.jit(names["train_step"], mesh)(*arguments)
        assert_close(actual, jax.jit(names["train_step"])(*arguments))


def test_the_bounds_that_the_page_says():
    bounds = mpmd.slice_bounds(64, 4, attention_share=0.25)
    assert f"here `{bounds}`" in TEXT


def figures(schedule, microbatches):
    simulation = simulate(schedule.tasks(microbatches), slices=schedule.slices)
    stages_on_slices = schedule.num_stages // schedule.mpmd_dim * schedule.slices
    return f"{simulation.bubble:.1%}, {max(simulation.peaks) / stages_on_slices:.3g}"


@pytest.mark.usual("8, 8, 8")
@pytest.mark.parametrize("row", table_after("## When it pays"), ids=lambda row: row[0])
def test_bubbles_and_memory(row):
    p, m, slices = map(int, row[0].split(","))
    schedules = (
        mpmd.Std1F1B(p),
        mpmd.ZeroBubble(p),
        mpmd.Seq1F1B(p, slices),
        mpmd.Seq1F1B(p, slices, split_backward=True),
        mpmd.Seq1F1B(2 * p, slices, mpmd_dim=p),
        mpmd.Seq1F1B(4 * p, slices, mpmd_dim=p),
    )
    assert row[1:] == [figures(schedule, m) for schedule in schedules]


def bubble(schedule, bounds, attention):
    """That of a schedule whose slices end there, if attention has such a share of the time."""

    def work(position):
        share = position / bounds[-1]
        return (1 - attention) * share + attention * share**2

    tasks = {
        (kind, schedule.numbers.number(stage, k)): time * (work(stop) - work(start))
        for k, (start, stop) in enumerate(itertools.pairwise(bounds))
        for stage in range(schedule.num_stages)
        for kind, time in (("fwd", 1), ("bwd", 2))
    }
    return f"{simulate(schedule.tasks(GROUPS), Costs(tasks=tasks), slices=SLICES).bubble:.1%}"


@pytest.mark.parametrize("row", table_after("### Slices of equal work"), ids=lambda row: row[0])
def test_equal_slices_wait_for_attention(row):
    attention = float(row[0])
    one, two = mpmd.Seq1F1B(GROUPS, SLICES), mpmd.Seq1F1B(2 * GROUPS, SLICES, mpmd_dim=GROUPS)
    equal = mpmd.slice_bounds(2**16, SLICES)
    fair = mpmd.slice_bounds(2**16, SLICES, attention_share=attention)
    assert row[1:] == [
        bubble(one, equal, attention),
        bubble(one, fair, attention),
        bubble(two, equal, attention),
    ]
