"""The ranking of schedules for a size."""

from __future__ import annotations

from mpmd.schedules.families import FAMILIES
from mpmd.simulate.compare import compare

TIMES = {"fwd": 1.0, "bwd": 2.0, "bwdA": 1.0, "bwdW": 1.0}


def names(candidates):
    return [candidate.schedule.name for candidate in candidates]


def test_all_families_with_backwards_are_ranked_by_the_time_of_the_same_step():
    found = compare(4, 8, TIMES)
    assert sorted(names(found.candidates)) == sorted(set(FAMILIES) - {"ForwardOnly"})
    times = [candidate.simulation.makespan for candidate in found.candidates]
    assert times == sorted(times)
    # However many stages the model is cut into, the work of a group is that of 8 microbatches.
    assert {round(busy, 9) for found in found.candidates for busy in found.simulation.busy} == {24.0}
    by_name = dict(zip(names(found.candidates), found.candidates, strict=True))
    figures = {name: (c.simulation.makespan, c.peak, c.period) for name, c in by_name.items()}
    p, m = 4, 8
    assert figures["GPipe"] == (3 * (m + p - 1), m, 3 * (m + p - 1))
    assert figures["Std1F1B"] == (3 * (m + p - 1), p, 3 * (m + p - 1))
    assert figures["Interleaved1F1B"] == (1.5 * (2 * m + p - 1), (p + 2 * (p - 1) + 1) / 2, 28.5)
    # Its bubble is at the ends, where the steps before and after reach in.
    assert figures["ZeroBubbleV"] == (3 * m + (p - 1) / 2, p, 3 * m)


def test_schedules_over_the_limit_of_memory_are_set_apart_and_others_keep_to_it():
    found = compare(4, 8, TIMES, memory_limit=4)
    assert all(candidate.peak <= 4 for candidate in found.candidates)
    assert all(candidate.peak > 4 for candidate in found.over_limit)
    assert {"GPipe", "Eager1F1B", "DualPipeV"} <= set(names(found.over_limit))
    assert {"ListSchedule", "ZeroBubbleH2", "VHalf"} <= set(names(found.candidates))
    [refusal] = compare(4, 8, TIMES, memory_limit=3).refusals
    assert refusal.startswith(
        "ZeroBubbleH2 keeps at least as many microbatches in flight as there are stages"
    )


def test_schedules_made_for_the_times_are_never_behind_those_that_are_not():
    uneven = {"fwd": 1.0, "bwd": 2.3, "bwdA": 0.9, "bwdW": 1.4}
    found = compare(4, 6, uneven, latency=0.2, stages_per_group=[1])
    times = {c.schedule.name: c.simulation.makespan for c in found.candidates}
    assert times["ListSchedule"] <= min(times["ZeroBubble"], times["ZeroBubbleH2"]) + 1e-9


def test_families_that_cannot_do_the_number_of_stages_say_so():
    found = compare(2, 4, TIMES, stages_per_group=[3])
    assert {c.schedule.num_stages for c in found.candidates} == {6}
    assert (
        "Std1F1B places one stage on each group: mpmd_dim=2 takes num_stages=2, got num_stages=6"
        in found.refusals
    )
    assert len(found.candidates) + len(found.refusals) == len(FAMILIES) - 1
