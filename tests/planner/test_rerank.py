"""The best candidates are ranked by their plans; what refuses to fit or compile says so."""

import dataclasses
import itertools

import pytest

from mpmd.errors import CompileError
from mpmd.planner.candidate import Candidate, Memory, Prediction, Row
from mpmd.planner.cluster import Cluster
from mpmd.planner.rerank import Limits, rerank
from mpmd.planner.trials.realize import Realized
from mpmd.schedules import Std1F1B
from mpmd.simulate import Costs, Link

WORK = 10
CLUSTER = Cluster(1, 4, 100.0, 1.0, 1.0, Link(), Link())


@dataclasses.dataclass(frozen=True)
class Planned(Realized):
    """A plan of which only the prediction and the size are there."""

    work: int = WORK


def row(number, seconds, memory=50.0, label=""):
    """A candidate with that number of microbatches, by formula."""
    candidate = Candidate((1,), ({"data": 1},), Std1F1B(1), number, remat=False, fsdp=False)
    return Row(candidate, prediction(seconds, memory, "formula"), label)


def prediction(seconds, memory, source):
    return Prediction(seconds, 0.1, 0.2, Memory(0, memory, 0, 0, 0, 0, 0), (seconds,), source)


def run(rows, plans, simulate=8, measure=0, seconds=None, again=(), searched=None, work=()):
    """The numbers of microbatches in the order of the result; what was planned; and the result.

    Args:
      plans: by the number of microbatches, the seconds and bytes that the plan shows, or the error.
      again: the rows for devices with less memory.
      searched: gets the memory of each search.
      work: by the number of microbatches, the size of a plan.
    """
    planned, searched = [], [] if searched is None else searched

    def realize(candidate):
        number = candidate.num_microbatches
        planned.append(number)
        found = plans.get(number, (float(number), 50.0))
        if isinstance(found, Exception):
            raise found
        size = dict(work).get(number, WORK)
        return Planned(None, None, Costs(), prediction(*found, "simulation"), work=size)

    def measured(realized, candidate):
        seconds = 10 - realized.prediction.seconds
        return dataclasses.replace(realized, prediction=prediction(seconds, 50.0, "measurement"))

    def search(memory):
        searched.append(memory)
        return rows if memory == CLUSTER.memory else again

    result = rerank(search, realize, measured, CLUSTER, Limits(simulate, seconds, measure))
    return [found.candidate.num_microbatches for found in result.rows], planned, result


def test_plans_rank_anew():
    order, planned, result = run([row(1, 1.0), row(2, 1.1), row(3, 1.2)], {1: (9.0, 50.0)})
    assert (order, planned, result.notes) == ([2, 3, 1], [1, 2, 3], ())
    assert result.winner.prediction.seconds == 2.0 and not result.rows[0].reason
    assert result.rows[1].reason.startswith("1.50 times the best")


def test_of_equally_fast_ones_the_smallest_plan_wins():
    plans = {1: (1.0, 50.0), 2: (1.009, 50.0), 3: (1.011, 50.0)}
    rows = [row(number, seconds) for number, (seconds, _) in plans.items()]
    order, _, result = run(rows, plans, work={1: 9, 2: 8, 3: 7})
    assert order == [2, 1, 3] and result.winner.work == 8
    assert [found.reason.split(":")[0] for found in result.rows] == ["", "as fast", "as fast"]
    assert run(rows, plans)[0] == [1, 2, 3]


def test_alternatives_are_planned_before_the_others():
    rows = [row(1, 1.0), row(2, 1.1), row(3, 1.2), row(4, 4.0, label="data parallel")]
    order, planned, result = run(rows, {}, simulate=2)
    assert planned == [1, 4, 2] and order == [1, 2, 4, 3]
    assert result.notes == ("3 candidates were planned and simulated; of 1 more, formulas say the costs",)
    assert result.rows[-1].reason.startswith("not planned; by the formulas")


def test_the_time_for_it_ends(monkeypatch):
    clock = itertools.count(step=40)
    monkeypatch.setattr("mpmd.planner.rerank.time.monotonic", lambda: float(next(clock)))
    _, planned, result = run([row(1, 1.0), row(2, 1.1), row(3, 1.2)], {}, seconds=60.0)
    assert planned == [1] and "(60 seconds were over; " in result.notes[0]


def test_without_a_time_the_work_decides_and_no_clock(monkeypatch):
    monkeypatch.setattr("mpmd.planner.rerank.time.monotonic", None)
    monkeypatch.setattr("mpmd.planner.rerank.MOST_WORK", 2 * WORK - 1)
    _, planned, result = run([row(1, 1.0), row(2, 1.1), row(3, 1.2)], {})
    assert planned == [1, 2] and "(their plans are large; " in result.notes[0]


def test_what_is_much_slower_by_formula_is_not_planned():
    _, planned, result = run([row(1, 1.0), row(2, 1.4), row(3, 1.6)], {2: (1.1, 50.0)})
    assert planned == [1, 2] and "over)" not in result.notes[0]


def test_it_goes_on_until_one_fits():
    plans = {1: (1.0, 200.0), 2: CompileError("marks are wrong\nat line 3")}
    order, planned, result = run([row(1, 1.0), row(2, 2.0), row(3, 3.0)], plans, simulate=1)
    assert planned == [1, 2, 3] and order == [3, 1, 2]
    assert result.rows[1].reason == "does not fit: needs 200 B of 100 B, 200 B for weights"
    assert result.rows[2].reason == "cannot be compiled: marks are wrong"


def test_what_does_not_fit_by_formula_is_not_planned():
    order, planned, _ = run([row(1, 1.0), row(2, 2.0, memory=300.0)], {})
    assert planned == [1] and order == [1, 2]


def test_measured_tasks_rank_before_the_others():
    order, _, result = run([row(1, 1.0), row(2, 1.1), row(3, 1.2)], {}, measure=2)
    assert order == [2, 1, 3]
    assert [found.prediction.source for found in result.rows] == ["measurement", "measurement", "simulation"]


def test_less_memory_is_searched_for_when_no_plan_fits():
    searched = []
    order, planned, result = run(
        [row(1, 1.0), row(2, 2.0)],
        {1: (1.0, 200.0), 2: (2.0, 125.0)},
        again=[row(2, 2.0), row(3, 3.0)],
        searched=searched,
    )
    assert (planned, order, searched) == ([1, 2, 3], [3, 1, 2], [100.0, 80.0])
    assert result.rows[1].reason.startswith("does not fit: needs 200 B of 100 B")


def test_the_best_of_an_alternative_has_its_label():
    plans = {1: (3.0, 50.0), 2: (2.0, 50.0), 3: (4.0, 50.0)}
    _, _, result = run([row(1, 1.0, label="one device"), row(2, 1.1), row(3, 1.2, label="as written")], plans)
    assert [found.label for found in result.rows] == ["one device", "", "as written"]
    assert result.rows[0].candidate.num_microbatches == 2


def test_nothing_can_be_run():
    plans = {1: (1.0, 200.0), 2: CompileError("marks are wrong"), 3: (1.0, 150.0)}
    message = r"(?s)no candidate can be run:.*3 microbatches.*needs 150 B of 100.*more memory.*marks are"
    with pytest.raises(ValueError, match=message):
        run([row(1, 1.0), row(2, 2.0), row(3, 3.0)], plans)
