"""Prints the tables of slices in docs/schedules.md: ``python docs/schedules/slices.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpmd.ir.plan import TaskKind, TaskType
from mpmd.schedules import Eager1F1B, Schedule, Seq1F1B, Std1F1B, ZeroBubble
from mpmd.simulate import Costs, Link, simulate

SIZES = [(4, 4, 4), (8, 8, 4), (8, 8, 8), (8, 16, 4), (8, 2, 8), (16, 16, 8)]
"""Groups, microbatches and slices."""
LATENCIES = (0.0, 0.01, 0.05, 0.1)
"""Times of a message, in forwards of a microbatch on a group."""

Row = Sequence[str]


def bubbles_and_memory() -> list[Row]:
    """The share of idle time, and the residuals of the fullest group in microbatches."""
    rows: list[Row] = [
        ("`p`, `m`, `S`", "1F1B", "ZB-H1", "Seq1F1B", "split", "`v = 2`", "`v = 4`"),
        ("---",) * 7,
    ]
    for p, m, s in SIZES:
        schedules = [Std1F1B(p), ZeroBubble(p), Seq1F1B(p, s), Seq1F1B(p, s, split_backward=True)]
        schedules += [Seq1F1B(v * p, s, p) for v in (2, 4)]
        rows.append((f"{p}, {m}, {s}", *(_bubble_and_memory(schedule, m) for schedule in schedules)))
    return rows


def _bubble_and_memory(schedule: Schedule, num_microbatches: int) -> str:
    parts = schedule.num_stages // schedule.mpmd_dim * schedule.slices
    simulated = simulate(schedule.tasks(num_microbatches), _costs(parts), slices=schedule.slices)
    return f"{simulated.bubble:.1%}, {max(simulated.peaks) / parts:.3g}"


def _costs(parts: int, latency: float = 0.0) -> Costs:
    times: dict[TaskKind, float] = {"fwd": 1.0, "bwd": 2.0, "bwdA": 1.0, "bwdW": 1.0}
    return Costs({kind: time / parts for kind, time in times.items()}, link=Link(latency=latency))


def attention() -> list[Row]:
    """The share of idle time if attention takes half of the time of a microbatch."""
    rows: list[Row] = [("slices", "Seq1F1B", "split", "`v = 2`", "`v = 4`"), ("---",) * 5]
    p, m, s = 8, 8, 8
    for name, bounds in (("equal lengths", equal(s)), ("equal work", of_equal_work(s, 0.5))):
        schedules = [Seq1F1B(p, s), Seq1F1B(p, s, split_backward=True)]
        schedules += [Seq1F1B(v * p, s, p) for v in (2, 4)]
        row = [
            simulate(schedule.tasks(m), Costs(tasks=_of_slices(schedule, bounds, 0.5)), slices=s).bubble
            for schedule in schedules
        ]
        rows.append((name, *(f"{bubble:.1%}" for bubble in row)))
    return rows


def equal(slices: int) -> list[float]:
    """The bounds of slices of equal length, as shares of the sequence."""
    return [k / slices for k in range(slices + 1)]


def of_equal_work(slices: int, attention_share: float) -> list[float]:
    """The bounds of slices of equal work, of which attention is a share: the roots of (1 - a) x + a x²."""
    linear = 1 - attention_share
    return [
        ((linear**2 + 4 * attention_share * k / slices) ** 0.5 - linear) / (2 * attention_share)
        for k in range(slices + 1)
    ]


def _of_slices(
    schedule: Schedule, bounds: Sequence[float], attention_share: float
) -> Mapping[TaskType, float]:
    """The times of tasks. Attention has no weight gradient."""
    times: dict[TaskType, float] = {}
    stages_per_group = schedule.num_stages / schedule.mpmd_dim
    for number in schedule.numbers.all:
        k = schedule.numbers.slice_of(number)
        linear = (1 - attention_share) * (bounds[k + 1] - bounds[k]) / stages_per_group
        attends = attention_share * (bounds[k + 1] ** 2 - bounds[k] ** 2) / stages_per_group
        times[TaskType("fwd", number)] = linear + attends
        times[TaskType("bwd", number)] = 2 * linear + 2 * attends
        times[TaskType("bwdA", number)] = linear + 2 * attends
        times[TaskType("bwdW", number)] = linear
    return times


def latencies() -> list[Row]:
    """The makespan where messages take a time."""
    p, m = 8, 16
    rows: list[Row] = [("", *(f"{latency:.0%}" for latency in LATENCIES)), ("---",) * (1 + len(LATENCIES))]
    schedules = {
        "`Std1F1B`": Std1F1B(p),
        "`Eager1F1B`": Eager1F1B(p),
        **{
            f"`Seq1F1B`, {s} slices{', eager' if eager else ''}": Seq1F1B(p, s, eager=eager)
            for s in (4, 8)
            for eager in (False, True)
        },
    }
    for name, schedule in schedules.items():
        tasks, s = schedule.tasks(m), schedule.slices
        times = [simulate(tasks, _costs(s, latency), slices=s).makespan for latency in LATENCIES]
        rows.append((name, *(f"{time:.1f}" for time in times)))
    return rows


def text(rows: Sequence[Row]) -> str:
    """A table as Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print("\n\n".join(map(text, (bubbles_and_memory(), attention(), latencies()))))
