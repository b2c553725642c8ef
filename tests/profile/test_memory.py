"""Memory over a recorded step: it begins and ends with what the plan says, and never exceeds the report."""

import itertools

import numpy as np
import pytest

import mpmd
from mpmd.memory import MemoryParts
from tests.support.parity import mesh_of
from tests.support.small_plans import MICROBATCHES, ROWS, WIDTH, step_of

STAGES = 3


def profiled_step(schedule, microbatches=MICROBATCHES):
    """The profile and the report of a step; the last group has no part in it."""
    weights = [np.ones((WIDTH, WIDTH), "float32")] * STAGES
    xs = np.ones((microbatches, ROWS, WIDTH), "float32")
    with mesh_of(STAGES + 1) as mesh:
        step = mpmd.jit(step_of(schedule(STAGES)), mesh).compile(weights, xs)
        return step.profile(weights, xs), step.report()


@pytest.fixture(scope="module")
def profiled():
    return profiled_step(mpmd.ZeroBubble)


def test_no_group_holds_more_than_the_report_says(profiled):
    profile, report = profiled
    for memory, group in zip(profile.memory, report.groups, strict=True):
        _, peak = memory.peak
        assert 0 < peak.total <= group.memory.peak_bytes or group.tasks == 0
        assert all(amount >= 0 for parts in memory.parts for amount in vars(parts).values() if amount)


def test_it_begins_with_arguments_and_ends_without_messages(profiled):
    profile, _ = profiled
    for memory in profile.memory:
        assert memory.times[0] == 0
        assert all(before < after for before, after in itertools.pairwise(memory.times))
        assert memory.parts[-1].messages == 0
        begin = memory.parts[0]
        assert begin.parameters + begin.arguments == begin.total


def test_activations_are_held_for_as_many_microbatches_as_the_schedule_has_under_way():
    """Of six microbatches, group 0 of GPipe holds the residuals of all, that of 1F1B as many as stages."""
    most = {}
    for schedule in (mpmd.GPipe, mpmd.Std1F1B):
        profile, _ = profiled_step(schedule, 2 * STAGES)
        most[schedule] = max(parts.activations for parts in profile.memory[0].parts)
    assert most[mpmd.GPipe] == 2 * most[mpmd.Std1F1B] > 0


def test_a_group_without_a_part_holds_nothing(profiled):
    profile, _ = profiled
    idle = profile.memory[STAGES]
    assert (idle.times, idle.parts) == ((0,), (MemoryParts(),))
