"""The rows of a choice as text and as a page."""

from mpmd.planner.candidate import Candidate, Memory, Prediction, Row
from mpmd.planner.choice_table import candidate_text, html_page, row_data, seconds_text, text_table
from mpmd.schedules import Interleaved1F1B, Std1F1B

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


def test_times_have_units_that_suit_them():
    assert [seconds_text(s) for s in (12.5, 0.0125, 1.25e-05)] == ["12.5 s", "12.5 ms", "12.5 µs"]


def test_the_best_rows_and_the_alternatives():
    best, other = (Candidate((2, 2), PAIR, Std1F1B(2), m, False, False) for m in (8, 16))
    rows = [row(best), row(other, reason="1.20 times the best"), row(other), row(best, label="FSDP")]
    text = text_table(rows, examples=64, shown=1)
    assert text.splitlines()[1].split()[:2] == ["1", "2"] and "128" in text and "25.0%" in text
    assert "FSDP: 2 groups" in text and "and 2 more candidates" in text and "1.20" not in text


def test_pages_escape_what_is_not_markup():
    candidate = Candidate((4,), ({"data": 1},), Std1F1B(1), 1, False, False)
    page = html_page("plan", "a < b", [row(candidate, reason="<none>")], examples=8)
    assert "a &lt; b" in page and "&lt;none&gt;" in page and page.count("<tr") == 2


def test_data_has_seconds_and_bytes():
    data = row_data(row(Candidate((2, 2), PAIR, Std1F1B(2), 8, False, False)), examples=64)
    assert data["examples_per_second"] == 128 and data["memory"]["total"] == 2**32 + 2**20 + 2**10
    assert data["candidate"]["submeshes"] == [{"data": 2, "model": 4}] * 2
