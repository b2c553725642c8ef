"""The messages that have arrived for one group."""

import os
import threading
import time

import numpy as np
import pytest

from cluster.transports import inbox as inbox_module
from cluster.transports.inbox import HEADER_BYTES, ProcessInbox
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId


class CountedArrival:
    """Counts how often it is dropped."""

    def __init__(self):
        self.times_dropped = 0

    def open(self, shardings):
        return [np.ones(1)]

    def drop(self):
        self.times_dropped += 1


@pytest.fixture
def inbox():
    inbox = ProcessInbox()
    yield inbox
    inbox.close()


def test_headers_reach_the_listener_of_their_source(inbox):
    received = []
    inbox.add_listener(1, lambda header: received.append("of another process"))
    inbox.add_listener(3, received.append)
    header = (3).to_bytes(4, "little").ljust(HEADER_BYTES, b"x")
    os.write(inbox.write_fd, header)
    inbox.wait(0, lambda: bool(received))
    assert received == [header]


def test_a_message_has_arrived_when_its_header_was_written(inbox):
    written = {}

    def listen(header):
        tag = header[4]
        inbox.add(MessageId(0, 3, 0, tag), CountedArrival(), written[tag])

    def arrived(tag, at):
        written[tag] = at
        os.write(inbox.write_fd, bytes([3, 0, 0, 0, tag]).ljust(HEADER_BYTES, b"x"))
        inbox.take(MessageId(0, 3, 0, tag))
        return inbox.arrived

    inbox.add_listener(3, listen)
    begin = time.perf_counter_ns()
    assert arrived(0, begin) == begin
    read = time.perf_counter_ns()
    assert begin < arrived(1, begin) <= read, "by this clock it would have been there at the last look"
    assert arrived(2, read + 10**12) <= time.perf_counter_ns()


def test_aborting_a_step_drops_its_messages_and_no_others(inbox):
    early, late, other = CountedArrival(), CountedArrival(), CountedArrival()
    inbox.add(MessageId(4, 1, 0, 0), early)
    inbox.add(MessageId(5, 1, 0, 0), other)
    inbox.abort(4, "group 1 failed")
    inbox.add(MessageId(4, 1, 0, 1), late)
    assert (early.times_dropped, late.times_dropped, other.times_dropped) == (1, 1, 0)
    with pytest.raises(StepAborted, match="group 1 failed"):
        inbox.take(MessageId(4, 1, 0, 0))
    assert inbox.take(MessageId(5, 1, 0, 0)) is other


def test_a_group_that_has_lost_a_peer_waits_for_the_reason(inbox, monkeypatch):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 60)
    inbox.mark_disconnected(1)
    threading.Timer(0.05, inbox.abort, (4, "group 1 died: out of memory")).start()
    with pytest.raises(StepAborted, match="out of memory"):
        inbox.take(MessageId(4, 1, 0, 0))


def test_without_a_reason_the_lost_peer_is_named(inbox, monkeypatch):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.1)
    inbox.add(MessageId(4, 1, 0, 0), CountedArrival())
    inbox.mark_disconnected(1)
    inbox.take(MessageId(4, 1, 0, 0))  # had arrived before
    with pytest.raises(StepAborted, match="group 1 is gone"):
        inbox.take(MessageId(4, 2, 0, 0))


def test_a_lost_peer_that_has_no_part_in_the_step_ends_no_wait(inbox, monkeypatch):
    monkeypatch.setattr(inbox_module, "ABORT_REASON_SECONDS", 0.0)
    arrival = CountedArrival()
    inbox.mark_disconnected(3)
    inbox.begin_step(4, groups=frozenset([0, 1]))
    threading.Timer(0.05, lambda: (inbox.add(MessageId(4, 1, 0, 0), arrival), inbox.wake())).start()
    assert inbox.take(MessageId(4, 1, 0, 0)) is arrival
    assert inbox.lost is None
    inbox.begin_step(5, groups=frozenset([0, 1, 3]))
    with pytest.raises(StepAborted, match="group 3 is gone"):
        inbox.take(MessageId(5, 1, 0, 0))
    assert inbox.lost.process == 3
    inbox.begin_step(6, groups=frozenset([0, 1]))
    assert inbox.lost is None, "if this step is aborted, the peer is not why"


def test_a_step_that_begins_ends_all_that_is_kept_of_earlier_steps(inbox):
    unread, late, current = CountedArrival(), CountedArrival(), CountedArrival()
    for step in range(1000):
        inbox.begin_step(step)
        inbox.abort(step, "a task failed")
        inbox.add(MessageId(step, 1, 0, 0), CountedArrival())
    inbox.add(MessageId(1000, 1, 0, 0), unread)
    inbox.begin_step(1001)
    assert not inbox._aborted
    assert not inbox._arrived
    inbox.add(MessageId(999, 1, 0, 1), late)  # of an aborted step that the inbox has forgotten
    inbox.abort(998, "a task failed")  # the group has run this step already
    inbox.add(MessageId(1001, 1, 0, 0), current)
    assert (unread.times_dropped, late.times_dropped, current.times_dropped) == (1, 1, 0)
    assert inbox.take(MessageId(1001, 1, 0, 0)) is current
    assert not inbox._aborted
    assert not inbox._arrived


def test_a_step_may_be_aborted_before_it_begins(inbox):
    inbox.begin_step(3)
    inbox.abort(5, "group 1 failed")
    inbox.begin_step(4)
    inbox.begin_step(5)
    with pytest.raises(StepAborted, match="group 1 failed"):
        inbox.take(MessageId(5, 1, 0, 0))
