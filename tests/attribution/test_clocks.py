"""Clocks of processes are matched by what went between them: nothing arrives before it was sent."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.attribution.clocks import match
from mpmd.ir.process_times import Host, ProcessTimes, RecordedStep, SendTime, WaitTime


def senders(edge, tag, rank):
    return (0,)


def process(group, clock, received, replied, sends=(), waits=()):
    return ProcessTimes(group, 0, Host("node", clock), received, received, replied, replied, (), waits, sends)


@st.composite
def recorded(draw):
    """A step of several groups, its true times, and by how much each clock is ahead."""
    groups = draw(st.integers(1, 5))
    ahead = [0, *(draw(st.integers(-(10**15), 10**15)) for _ in range(groups))]
    flights = st.integers(0, 10**6)
    times = []
    messages = draw(
        st.lists(
            st.tuples(st.integers(0, groups - 1), st.integers(0, groups - 1), flights, flights), max_size=12
        )
    )
    for group in range(groups):
        sends = tuple(
            SendTime(dst, tag, 10**7 + at, 10**7 + at)
            for tag, (src, dst, at, _) in enumerate(messages)
            if src == group and dst != group
        )
        waits = tuple(
            WaitTime(src, tag, 0, 10**7 + at + flight, 10**7 + at + flight)
            for tag, (src, dst, at, flight) in enumerate(messages)
            if dst == group and src != group
        )
        times.append(process(group, f"clock {group}", draw(flights), 10**8 + draw(flights), sends, waits))
    true = RecordedStep(Host("node", "driver"), 0, 10**8 + 3 * 10**6, tuple(times))
    shown = [each.shifted(offset) for each, offset in zip(times, ahead[1:], strict=True)]
    return true, dataclasses.replace(true, processes=tuple(shown))


@given(recorded())
def test_nothing_arrives_before_it_was_sent_and_the_error_holds(steps):
    true, shown = steps
    matched = match(shown, senders)
    sent = {(p.mpmd_idx, s.dst, s.tag): s.start for p in matched.processes for s in p.sends}
    for times, right in zip(matched.processes, true.processes, strict=True):
        assert 0 <= times.received <= times.replied <= matched.returned
        assert abs(times.received - right.received) <= matched.errors[times.host.clock]
        for wait in times.waits:
            assert wait.arrived >= sent[wait.src, times.mpmd_idx, wait.tag]


def test_processes_of_one_kernel_need_no_match():
    step = RecordedStep(Host("node", "c"), 100, 900, (process(0, "c", 120, 880), process(1, "c", 500, 890)))
    matched = match(step, senders)
    assert matched.errors == {"c": 0}
    assert [times.received for times in matched.processes] == [20, 400]


@pytest.mark.parametrize("drift", [1, 7, 1000])
def test_clocks_that_drift_are_matched_with_a_larger_error(drift):
    """The reply seems to arrive before it was sent, by as much as the clocks have drifted."""
    step = RecordedStep(Host("a", "a"), 0, 10_000, (process(0, "b", 100, 10_100 + drift),))
    matched = match(step, senders)
    assert matched.error >= drift / 2
    assert matched.error <= drift + 1
