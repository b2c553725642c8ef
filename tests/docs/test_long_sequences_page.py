"""The page on long sequences: its step trains as plain JAX, and its figures are those of the simulator."""

import itertools
import re
from pathlib import Path

import jax
import pytest

import mpmd
from mpmd.simulate import Costs, Link, simulate
from tests.support.parity import assert_close

TEXT = (Path(__file__).parents[2] / "docs" / "long_sequences.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
GROUPS, SLICES = 8, 8


def table_after(heading):
    """The cells of the first table after a text, without its heading and the names of its columns."""
    lines = TEXT[TEXT.index(heading) :].splitlines()
    rows = itertools.takewhile(
        lambda line: line.startswith("|"), itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    )
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows][2:]


@pytest.fixture(scope="module")
def names():
    """The names of all blocks, run in their order."""
    names = {}
    for block in BLOCKS:
        exec(block, names)
    yield names
    names["mesh"].close()


def test_the_step_trains_as_plain_jax(names):
    arguments = names["params"], names["tokens"], names["targets"]
    assert_close((names["trained"], names["loss"]), jax.jit(names["train_step"])(*arguments))


def test_the_bounds_that_the_page_says():
    bounds = mpmd.slice_bounds(64, 4, attention_share=0.25)
    assert f"here `{bounds}`" in TEXT


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


def test_the_figures_that_the_page_begins_with():
    slices, whole = mpmd.Seq1F1B(GROUPS, SLICES), mpmd.Std1F1B(GROUPS)
    for schedule in (slices, whole):
        simulation = simulate(schedule.tasks(GROUPS), slices=schedule.slices)
        assert f"{simulation.bubble:.1%} under `{schedule.name}`" in " ".join(TEXT.split())


def test_messages_count_for_each_slice():
    """From a message of 5% of a microbatch's forward on, 8 slices take longer than 4."""

    def makespan(slices, latency):
        costs = Costs({"fwd": 1 / slices, "bwd": 2 / slices}, link=Link(latency=latency))
        return simulate(mpmd.Seq1F1B(GROUPS, slices).tasks(16), costs, slices=slices).makespan

    assert makespan(8, 0.02) < makespan(4, 0.02) and makespan(8, 0.05) > makespan(4, 0.05)
