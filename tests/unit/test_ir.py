"""The text of a schedule's cell reads back as the cell."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.ir import FusedTask, Task, parse_cell

kinds = st.sampled_from(["fwd", "bwd", "bwdA", "bwdW"])
tasks = st.builds(Task, kinds, st.integers(0, 10_000), st.integers(0, 10_000))
fused_tasks = st.builds(FusedTask, st.lists(tasks, min_size=2, max_size=5).map(tuple))


@settings(deadline=None)
@given(tasks | fused_tasks)
def test_a_printed_cell_reads_back(cell):
    assert parse_cell(str(cell)) == cell
    assert parse_cell(f" {cell}\n") == cell


def test_cells_print_like_jaxpp():
    forward, backward = Task("fwd", 3, 0), Task("bwd", 3, 0)
    assert str(forward) == "fwd_3__0"
    assert str(FusedTask((forward, backward))) == "FusedTask(fwd_3__0, bwd_3__0)"


def test_a_cell_lists_its_tasks():
    forward, backward = Task("fwd", 3, 0), Task("bwd", 3, 0)
    assert forward.tasks == (forward,)
    assert FusedTask((forward, backward)).tasks == (forward, backward)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "after_0",
        "fwd_1",
        "fwd_1_2",
        "fwd_-1__0",
        "bwdX_0__0",
        "fwd_0__0, bwd_0__0",
        "FusedTask()",
        "FusedTask(fwd_0__0)",
        "FusedTask(fwd_0__0, )",
        "FusedTask(fwd_0__0, FusedTask(fwd_1__0, bwd_1__0))",
    ],
)
def test_other_text_is_an_error(text):
    with pytest.raises(ValueError, match="is not a task; write"):
        parse_cell(text)
