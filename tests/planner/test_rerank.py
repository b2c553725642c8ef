"""The best candidates are ranked by their plans; what refuses to fit or compile says so."""

import dataclasses
import itertools

import pytest

from mpmd.errors import CompileError
from mpmd.planner.candidate import Candidate, Memory, Prediction, Row
from mpmd.planner.cluster import Cluster
from mpmd.planner.reasons import StepDoesNotFit
from mpmd.planner.rerank import PlanningLimits, rerank
from mpmd.planner.trials.realize import Realized
from mpmd.schedules import Std1F1B, ZeroBubble
from mpmd.simulate import Costs, Link

SIZE = 10
CLUSTER = Cluster(1, 4, 100.0, 1.0, 1.0, Link(), Link())


@dataclasses.dataclass(frozen=True)
class Planned(Realized):
    """A plan of which only the prediction and the size are there."""

    size: int = SIZE


TWO = ({"data": 1}, {"data": 1})


def row(number, seconds, memory=50.0, label="", schedule=None, submeshes=({"data": 1},)):
    """A candidate with that number of microbatches, by formula."""
    schedule = schedule or Std1F1B(len(submeshes))
    stages = (1,) * schedule.num_stages
    candidate = Candidate(stages, submeshes, schedule, number, remat=False, fsdp=False)
    return Row(candidate, prediction(seconds, memory, "formula"), label)


def prediction(seconds, memory, source):
    return Prediction(seconds, 0.1, 0.2, Memory(0, memory, 0, 0, 0, 0, 0), (seconds,), source)


def run(
    rows,
    plans,
    simulate=8,
    measure=0,
    seconds=None,
    again=(),
    searched=None,
    sizes=(),
    measured=(),
    needed=50.0,
):
    """The numbers of microbatches in the order of the result; what was planned; and the result.

    Args:
      plans: by the number of microbatches, the seconds that the plan shows, with bytes where they are not 50,
        or the error.
      again: the rows for devices with less memory.
      searched: gets the share of the memory of each search.
      sizes: by the number of microbatches, the size of a plan.
      measured: by the number of microbatches, the seconds that are measured; 10 less those of the plan.
      needed: the bytes that measured tasks need.
    """
    planned, searched = [], [] if searched is None else searched

    def realize(candidate):
        number = candidate.num_microbatches
        planned.append(number)
        found = plans.get(number, float(number))
        if isinstance(found, Exception):
            raise found
        seconds, memory = found if isinstance(found, tuple) else (found, 50.0)
        size = dict(sizes).get(number, SIZE)
        return Planned(None, None, Costs(), prediction(seconds, memory, "simulation"), {}, size=size)

    def measure_tasks(realized, candidate):
        seconds = dict(measured).get(candidate.num_microbatches, 10 - realized.prediction.seconds)
        return dataclasses.replace(realized, prediction=prediction(seconds, needed, "measurement"))

    def search(share):
        searched.append(share)
        return rows if share == 1.0 else again

    result = rerank(search, realize, measure_tasks, CLUSTER, PlanningLimits(simulate, seconds, measure))
    return [found.candidate.num_microbatches for found in result.rows], planned, result


def test_of_equally_fast_ones_the_smallest_plan_wins():
    plans = {1: 1.0, 2: 1.009, 3: 1.011}
    rows = [row(number, seconds) for number, seconds in plans.items()]
    order, _, result = run(rows, plans, sizes={1: 9, 2: 8, 3: 7})
    assert order == [2, 1, 3] and result.winner.size == 8
    assert [found.reason.split(":")[0] for found in result.rows] == ["", "as fast", "as fast"]
    assert run(rows, plans)[0] == [1, 2, 3]


def test_the_best_of_each_kind_is_planned_before_the_others():
    rows = [row(1, 1.0), row(2, 1.1), row(3, 1.2), row(4, 1.3, submeshes=TWO)]
    order, planned, result = run(rows, {4: 0.5}, simulate=2)
    assert planned == [1, 4] and order == [4, 1, 2, 3]
    (note,) = result.notes
    assert note.startswith("candidates that were planned and simulated: 2; of 2 more, formulas say the costs")
    assert result.rows[-1].reason.startswith("not planned; by the formulas")


def test_the_time_for_it_ends(monkeypatch):
    clock = itertools.count(step=40)
    monkeypatch.setattr("mpmd.planner.rerank.time.monotonic", lambda: float(next(clock)))
    _, planned, result = run([row(1, 1.0), row(2, 1.1), row(3, 1.2)], {}, seconds=30.0)
    assert planned == [1] and [found.prediction.source for found in result.rows][1:] == ["formula"] * 2


def test_what_would_not_be_chosen_by_formula_is_not_planned_unless_a_number_is_asked_for():
    rows = [row(1, 1.0, submeshes=TWO), row(2, 1.02, schedule=ZeroBubble(2), submeshes=TWO), row(3, 1.06)]
    for simplest, best, expected in ((1.05, 1.0, [3]), (2.0, 1.0, [3, 1]), (2.0, 1.1, [3, 1, 2])):
        assert run(rows, {1: best, 3: simplest}, simulate=None)[1] == expected
    assert sorted(run(rows, {}, simulate=3)[1]) == [1, 2, 3]
    assert len(run(rows, {1: 0.95}, simulate=None, measure=2)[1]) == 2


def test_it_goes_on_until_one_fits():
    plans = {1: (1.0, 200.0), 2: CompileError("marks are wrong\nat line 3")}
    rows, searched = [row(1, 1.0), row(2, 2.0), row(3, 3.0)], []
    order, planned, result = run(rows, plans, simulate=1, again=rows, searched=searched)
    assert planned == [1, 2, 3] and order == [3, 1, 2] and searched == [1.0, 0.5]
    assert result.rows[1].reason == "does not fit: needs 200 B of 100 B, 200 B for weights"
    assert result.rows[2].reason == "cannot be compiled: marks are wrong"


def test_what_does_not_fit_by_formula_is_not_planned():
    order, planned, _ = run([row(1, 1.0), row(2, 2.0, memory=300.0)], {})
    assert planned == [1] and order == [1, 2]


def test_the_simplest_of_those_within_the_expected_error_wins():
    rows = [
        row(1, 1.0, schedule=ZeroBubble(2), submeshes=({"data": 2}, {"data": 1})),
        row(2, 1.0, schedule=ZeroBubble(2), submeshes=TWO),
        row(3, 1.0, submeshes=TWO),
        row(4, 1.0, submeshes=TWO),
    ]
    plans = {1: 1.0, 2: 1.02, 3: 1.05, 4: 1.06}
    order, _, result = run(rows, plans)
    assert order == [3, 1, 2, 4], "4 is further off than the error of a plan, 5%"
    assert result.notes == (), "all are planned"
    assert (
        result.rows[1].reason
        == "as fast, 0.95 times the best within the expected error of 5%; its groups differ"
    )
    assert result.rows[2].reason.endswith("5%; ZeroBubble is less usual")
    assert run(rows[:2], plans)[0] == [2, 1]
    assert run(rows, {**plans, 3: 1.06})[0] == [2, 1, 3, 4]


@pytest.mark.parametrize(
    ("complex_one", "simple_one", "reason"),
    [
        (TWO, ({"data": 2},), "a pipeline is less simple"),
        (({"model": 2, "data": 2},) * 2, ({"data": 4},) * 2, "devices share its layers"),
        (({"sequence": 2, "data": 2},) * 2, ({"data": 4},) * 2, "devices share its layers"),
    ],
)
def test_what_is_simpler_wins_within_the_expected_error(complex_one, simple_one, reason):
    rows = [row(1, 1.0, submeshes=complex_one), row(2, 1.05, submeshes=simple_one)]
    order, _, result = run(rows, {1: 1.0, 2: 1.05})
    assert order == [2, 1] and result.rows[1].reason.endswith(f"5%; {reason}")
    order, _, _ = run(rows, {1: 1.0, 2: 1.06})
    assert order == [1, 2], "further off than the error of a plan, 5%"


def test_rows_that_are_not_measured_are_scaled():
    rows, plans = [row(n, 1.0) for n in (1, 2, 3, 4)], {}
    order, _, result = run(rows, plans, measure=2, measured={1: 2.5, 2: 3.0})
    # Measured over simulated: 2.5 and 1.5, so 2; what is left is simulated to take at least 3.
    assert order == [1, 2, 3, 4]
    assert [found.prediction.seconds for found in result.rows] == [2.5, 3.0, 6.0, 8.0]
    assert result.rows[2].reason.startswith("2.40 times the best")
    assert result.rows[0].prediction.expected_error < result.rows[2].prediction.expected_error
    assert "tasks were measured: 2;" in result.notes[0] and "by 2.00, the median" in result.notes[0]


@pytest.mark.parametrize(("asked", "sources"), [(1, "mmmpp"), (2, "mmmmp")])
def test_measuring_goes_on_until_the_best_beats_what_is_left(asked, sources):
    plans = {1: 1.0, 2: 1.02, 3: 1.04, 4: 1.04, 5: 1.4}
    measured = {1: 1.3, 2: 1.25, 3: 1.24, 4: 1.23}
    order, _, result = run([row(n, 1.0) for n in plans], plans, measure=asked, measured=measured)
    # The median is 1.23 after 3, so 4 may be as fast, and 5 cannot be; three for each that is asked for.
    found = {row.candidate.num_microbatches: row.prediction.source[0] for row in result.rows}
    assert "".join(found[number] for number in plans).replace("s", "p") == sources
    assert order[0] == 2 + asked


def test_reasons_of_what_is_not_planned_compare_with_the_final_best_by_formula():
    rows = [row(1, 1.0), row(2, 1.2), row(3, 1.5)]
    order, _, result = run(rows, {1: 3.0, 2: 2.0}, simulate=2)
    assert order == [2, 1, 3]
    assert result.rows[2].reason.startswith("not planned; by the formulas 1.25 times the best")


def test_less_memory_is_searched_for_when_no_plan_fits():
    searched = []
    order, planned, result = run(
        [row(1, 1.0), row(2, 2.0)],
        {1: (1.0, 200.0), 2: (2.0, 125.0)},
        again=[row(2, 2.0), row(3, 3.0)],
        searched=searched,
    )
    assert (planned, order, searched) == ([1, 2, 3], [3, 1, 2], [1.0, 0.8])
    assert result.rows[1].reason.startswith("does not fit: needs 200 B of 100 B")


def test_the_best_of_an_alternative_has_its_label():
    plans = {1: 3.0, 2: 2.0, 3: 4.0}
    _, _, result = run([row(1, 1.0, label="one device"), row(2, 1.1), row(3, 1.2, label="as written")], plans)
    assert [found.label for found in result.rows] == ["one device", "", "as written"]
    assert result.rows[0].candidate.num_microbatches == 2


def test_nothing_can_be_run():
    plans = {1: (1.0, 200.0), 2: CompileError("marks are wrong"), 3: (1.0, 150.0)}
    message = r"(?s)no candidate can be run:.*3 microbatches.*needs 150 B of 100.*more memory.*marks are"
    with pytest.raises(StepDoesNotFit, match=message):
        run([row(1, 1.0), row(2, 2.0), row(3, 3.0)], plans)
    with pytest.raises(ValueError, match="marks are wrong") as raised:
        run([row(2, 1.0)], plans)
    assert not isinstance(raised.value, StepDoesNotFit)


def test_nothing_can_be_run_whose_measured_tasks_need_more_memory_than_their_plan():
    with pytest.raises(StepDoesNotFit, match=r"(?s)no candidate can be run:.*needs 150 B of 100"):
        run([row(1, 1.0)], {}, measure=1, needed=150.0)
