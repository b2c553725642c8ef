"""The rows of a choice as text and as a page."""

import dataclasses

import pytest

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate, Memory, Prediction, Row
from mpmd.planner.choice_table import (
    ChoiceDetails,
    candidate_text,
    row_data,
    seconds_text,
    terminal_width,
    text_table,
)
from mpmd.schedules import Interleaved1F1B, Seq1F1B, Std1F1B
from tests.support.profiles import gpt

PAIR = ({"data": 2, "model": 4}, {"data": 2, "model": 4})


def row(candidate, seconds=0.5, label="", reason=""):
    memory = Memory(1, 2**30, 2**30, 2**31, 2**20, 0, 2**10)
    return Row(candidate, Prediction(seconds, 0.25, 0.125, memory, (0.1, 0.2), "simulation"), label, reason)


def test_candidates_in_words():
    groups = Candidate((2, 2), PAIR, Std1F1B(2), 8, remat=True, fsdp=True)
    assert candidate_text(groups) == "2 groups of data 2 model 4, Std1F1B, 8 microbatches, remat, FSDP"
    uneven = Candidate((3, 1, 1, 1), ({"data": 2}, {"model": 4}), Interleaved1F1B(4, 2), 8, False, False)
    assert candidate_text(uneven) == (
        "groups 0: data 2; 1: model 4, Interleaved1F1B, 4 stages, 8 microbatches, layers 3 1x3"
    )
    alone = Candidate((4,), ({"data": 1},), Std1F1B(1), 1, False, False)
    assert candidate_text(alone) == "one device, 1 microbatch"
    later = dataclasses.replace(groups, num_microbatches=4, remat=(Remat.NONE,))
    assert candidate_text(dataclasses.replace(groups, later=(groups, later))) == (
        "2 groups of data 2 model 4, FSDP; loops 0..1: Std1F1B, 8 microbatches, remat; "
        "loop 2: Std1F1B, 4 microbatches"
    )
    for schedule, text in (
        (Seq1F1B(4, 2, eager=True), "eager Seq1F1B of 2 slices, "),
        (Seq1F1B(4, 2, split_backward=True), "Seq1F1B of 2 slices with split backwards, "),
    ):
        assert text in candidate_text(Candidate((1,) * 4, ({},) * 4, schedule, 2, False, False))


def test_times_have_units_that_suit_them():
    assert [seconds_text(s) for s in (12.5, 0.0125, 1.25e-05)] == ["12.5 s", "12.5 ms", "12.5 µs"]


def test_the_best_rows_and_the_alternatives():
    best, other = (Candidate((2, 2), PAIR, Std1F1B(2), m, False, False) for m in (8, 16))
    rows = [row(best), row(other, reason="1.20 times the best"), row(other), row(best, label="FSDP")]
    text = text_table(rows, shown=1, width=100)
    assert text.splitlines()[1].split()[:3] == ["1", "500", "ms"] and "25.0%" in text
    assert "FSDP: 2 groups" in text and "and 2 more candidates" in text and "1.20" not in text


@pytest.mark.parametrize("columns", ["40", "80", "100", "300"])
def test_tables_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    width = terminal_width()
    assert 80 <= width <= 120
    groups = tuple({"data": 2, "model": 1 + number} for number in range(8))
    wide = Candidate((2, 1) * 4, groups, Std1F1B(8), 128, remat=True, fsdp=True)
    rows = [row(wide, reason="1.20 times the best: devices compute 1.20 times as much") for _ in range(3)]
    lines = text_table(rows, 1, width).splitlines()
    assert max(map(len, lines)) <= width and len(lines) > 4
    profile = gpt(num_layers=2)
    details = ChoiceDetails("chosen", tuple(rows), 64, (profile,))
    text = str(details)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("temporaries") == 3 and "0  embedding: " in text
    assert details.to_html().count("<tr") == 4 == details._repr_html_().count("<tr")


def test_pages_escape_what_is_not_markup():
    candidate = Candidate((4,), ({"data": 1},), Std1F1B(1), 1, False, False)
    page = ChoiceDetails("a < b", (row(candidate, reason="<none>"),), 8, ()).to_html()
    assert "a &lt; b" in page and "&lt;none&gt;" in page and page.count("<tr") == 2


def test_data_has_seconds_and_bytes():
    data = row_data(row(Candidate((2, 2), PAIR, Std1F1B(2), 8, False, False)), examples=64)
    assert data["examples_per_second"] == 128 and data["memory"]["total"] == 2**32 + 2**20 + 2**10
    assert data["candidate"]["submeshes"] == [{"data": 2, "sequence": 1, "model": 4}] * 2
