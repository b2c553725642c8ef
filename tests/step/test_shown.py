"""Plans, steps, reports and results show themselves in notebooks and terminals."""

import re

import jax
import numpy as np
import pytest

import mpmd
from mpmd.simulate import Costs
from mpmd.util.notebook import ShownAsText
from tests.support.parity import mesh_of
from tests.support.small_plans import MICROBATCHES, ROWS, WIDTH, lowered, step_of


def arguments():
    return [np.ones((WIDTH, WIDTH), "float32")] * 2, np.ones((MICROBATCHES, ROWS, WIDTH), "float32")


class Hostile(ShownAsText):
    def __str__(self):
        return "<script>alert('&')</script>"


def test_text_is_escaped_in_notebooks():
    html = Hostile()._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in html


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(mesh):
    return mpmd.jit(step_of(mpmd.GPipe(2)), mesh).compile(*arguments())


def test_a_plan_shows_a_summary_and_has_the_whole_as_text():
    plan = lowered(mpmd.GPipe(2), [{"data": 2}, {"data": 1}]).plan
    assert repr(plan).splitlines() == [
        "GPipe: stages 0 to 1, 3 microbatches",
        "group  devices  stages  tasks  messages sent  arguments",
        "    0   data 2       0      8              3      640 B",
        "    1   data 1       1      8              3      256 B",
        "plan.text() has all instructions",
    ]
    assert plan.text() == str(plan)
    assert len(plan.text().splitlines()) > 40


def test_steps_reports_and_profiles_show_their_text(step, mesh):
    assert repr(step).startswith("LoadedStep with the plan of GPipe: stages 0 to 1, 3 microbatches\ngroup")
    profile = step.profile(*arguments())
    for shown in (step.report(), mpmd.explain(step), mesh.status(), profile):
        assert repr(shown) == str(shown)
        assert shown._repr_html_().startswith("<pre")


def test_a_function_shows_what_it_was_compiled_to(mesh):
    function = mpmd.jit(step_of(mpmd.GPipe(2)), mesh)
    assert repr(function) == f"mpmd.jit of {function.__name__} for 2 groups, not compiled yet"
    loaded = function.compile(*arguments())
    first, *plan = repr(function).splitlines()
    assert first == f"mpmd.jit of {function.__name__} for 2 groups, compiled to this plan"
    assert "\n".join(plan) == loaded.plan.shown()
    assert "GPipe: stages 0 to 1" in function._repr_html_()


def test_metrics_show_the_steps_so_far(step):
    with mpmd.metrics(step, lambda number, values: None) as metrics:
        jax.block_until_ready(step(*arguments()))
        metrics._meter.wait()
        assert re.fullmatch(
            r"mpmd.metrics of \w+: \d+ steps have ended, 0 are under way(; one takes .* s)?", repr(metrics)
        )
    assert metrics._repr_html_().startswith("<pre")


def test_the_events_of_a_profile_are_asked_for(step, tmp_path):
    profile = step.profile(*arguments())
    text = "and not the Profile that has them: pass its .events"
    with pytest.raises(TypeError, match=f"events must be the events of a step, {text}"):
        Costs.measured(profile)
    with pytest.raises(TypeError, match=f"source must be the events of a step, {text}"):
        mpmd.render.draw_timeline(profile, tmp_path / "step.svg")
    assert Costs.measured(profile.events).kinds


def test_a_profile_says_where_the_time_of_each_group_went(step):
    lines = str(step.profile(*arguments(), steps=3)).splitlines()
    assert lines[0].startswith("a step of ")
    assert lines[0].endswith(", the median of 3; of it, each group was")
    columns = lines[1].split()
    assert columns[:3] == ["group", "at", "work"]
    for number, line in enumerate(lines[2:4]):
        group, *shares = line.split()
        assert int(group) == number
        assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_a_loss_shows_its_value_when_it_is_there(step):
    weights, loss = step(*arguments())
    jax.block_until_ready(loss)
    assert repr(loss).startswith(f"MpmdArray({np.asarray(loss)}, shape=(), dtype=float32")
    assert repr(weights[0]).startswith("MpmdArray(shape=(8, 8)")
    loss.delete()
    assert "deleted" in repr(loss)
