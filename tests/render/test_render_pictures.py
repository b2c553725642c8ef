"""Pictures of schedules and of measured steps: what they say, and that they are the same every time."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from mpmd.ir.events import Event
from mpmd.ir.plan import parse_task
from mpmd.render import draw_comparison, draw_timeline
from mpmd.schedules import GPipe, Interleaved1F1B, Std1F1B
from mpmd.schedules.v_shaped import ZeroBubbleV
from mpmd.simulate import Costs, simulate

from .test_render import EVENTS

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib")


def drawn(path):
    """The texts of a picture, and how often each is there."""
    texts = [element.text for element in ElementTree.parse(path).iter(f"{SVG}text")]
    return {text: texts.count(text) for text in texts}


def timeline(source, path, **options):
    draw_timeline(source, path / "step.svg", **options)
    return drawn(path / "step.svg")


def test_a_picture_of_a_schedule(tmp_path):
    texts = timeline(simulate(Std1F1B(3).tasks(5)), tmp_path, title="1F1B")
    assert {
        "1F1B",
        "3 groups, 3 stages, 5 microbatches:  makespan 21, bubble 28.6%, peak memory 3",
    } <= set(texts)
    assert {"stages 0 to 2", "forward", "backward", "idle", "residuals held, in microbatches"} <= set(texts)
    assert texts["group 2"] == 2  # its lane and its memory
    assert texts["4"] == 2 * 3  # the last microbatch's forwards and backwards
    assert texts["71%"] == 3


def test_split_backwards_fused_tasks_and_several_stages_are_explained(tmp_path):
    texts = timeline(simulate(ZeroBubbleV(8, 4).tasks(2)), tmp_path)
    assert {"stages 0 to 3", "stages 7 to 4", "input gradient", "weight gradient"} <= set(texts)
    assert not {"backward", "fused", "waiting"} & set(texts)
    assert "fused" in timeline(simulate(Interleaved1F1B(4, 2).tasks(2), Costs(atomic=True)), tmp_path)


def test_a_picture_of_a_measured_step(tmp_path):
    texts = timeline(EVENTS, tmp_path)
    assert {"Measured step", "2 groups, 2 stages, 1 microbatch:  makespan 9 ms, bubble 50.0%"} <= set(texts)
    assert {"67%", "33%", "outside the loop", "waiting", "after_0", "ms"} <= set(texts)
    assert not {"wait for group 1", "memory held", "residuals held, in microbatches"} & set(texts)


def test_a_measured_step_and_below_it_the_ideal(tmp_path):
    tasks = Std1F1B(2).tasks(1)
    ideal = simulate(tasks, Costs(kinds={"fwd": 1e-3, "bwd": 2e-3}))
    texts = timeline(EVENTS, tmp_path, title="Std1F1B", ideal=ideal)
    assert {
        "Std1F1B",
        "2 groups, 2 stages, 1 microbatch;  measured:  makespan 9 ms, bubble 50.0%",
    } <= set(texts)
    (below,) = (text for text in texts if text.startswith("simulated"))
    assert "makespan 6 ms, bubble 50.0%" in below
    assert texts["group 1"] == 2  # measured and simulated
    assert texts["ms"] == 2


def test_numbers_that_do_not_fit_are_left_out(tmp_path):
    texts = timeline(
        [Event(0, parse_task("fwd_0__777"), 0.0, 1e-6), Event(0, parse_task("bwd_0__888"), 1e-6, 1.0)],
        tmp_path,
    )
    assert "888" in texts
    assert "777" not in texts


def test_many_groups_have_thin_lanes_without_numbers_and_fewer_labels(tmp_path):
    texts = timeline(simulate(GPipe(64).tasks(2)), tmp_path)
    assert "1" not in texts
    assert [text for text in texts if re.fullmatch(r"group \d+", text)] == [
        f"group {i}" for i in range(0, 64, 2)
    ]
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert float(root.attrib["height"].removesuffix("pt")) < 72 * 12


def test_a_simulation_of_a_plan_is_in_seconds_and_bytes(tmp_path):
    costs = Costs({"fwd": 0.001, "bwd": 0.002})
    texts = timeline(simulate(GPipe(1).tasks(3), costs), tmp_path, of_plan=True)
    assert {"memory held", "3 B", "ms"} <= set(texts)
    assert "1 group, 1 stage, 3 microbatches:  makespan 9 ms, bubble 0.0%, peak memory 3 B" in texts


def test_the_same_picture_has_the_same_bytes(tmp_path):
    simulation = simulate(Std1F1B(2).tasks(2))
    for name in ("one.svg", "two.svg", "one.png", "two.png"):
        draw_timeline(simulation, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_several_schedules_on_one_page(tmp_path):
    simulations = {"first": simulate(GPipe(2).tasks(4)), "second": simulate(Std1F1B(2).tasks(4))}
    draw_comparison(simulations, tmp_path / "page.svg", title="Two groups", memory_limit=3)
    texts = drawn(tmp_path / "page.svg")
    assert {"Two groups", "first", "second", "peak memory; limit 3"} <= set(texts)
    assert {"makespan 15, bubble 20.0%, peak memory 4", "makespan 15, bubble 20.0%, peak memory 2"} <= set(
        texts
    )


def test_a_picture_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no events to draw"):
        draw_timeline([], tmp_path / "step.png")
    with pytest.raises(ValueError, match="no group has tasks"):
        draw_timeline(simulate([[], []]), tmp_path / "step.png")
    with pytest.raises(ValueError, match="no schedules to compare"):
        draw_comparison({}, tmp_path / "page.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'mpmd\[plot\]'"):
        draw_timeline(EVENTS, tmp_path / "step.png")
