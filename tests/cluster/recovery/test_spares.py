"""Spares, prepared and new processes that take over from dead processes. Nothing is started."""

import pytest

from cluster.driver.calls import liveness
from cluster.driver.calls.liveness import TimeLimits
from cluster.recovery import spares
from cluster.recovery.spares import Spares
from cluster.start.resources import Reservation, SharedDevices
from mpmd.runtime.activity import Activity, ActivityKind, Doing
from tests.support.processes import endpoints

IDLE = Activity().read()
"""What a process answers to a ping."""


class Call:
    """A method of an actor; ``remote`` gives what Ray would."""

    def __init__(self, actor, name):
        self.remote = lambda *arguments: (actor, name, arguments)


class Actor:
    def __init__(self, number, allocation):
        self.number, self.allocation = number, allocation
        self.is_ready = self.is_alive = True
        self.is_stopped = False
        self.adopted = []

    def __getattr__(self, name):
        return Call(self, name)


class Ray:
    """In place of ``ray``. A call is the actor, the method and the arguments."""

    class exceptions:
        class RayError(Exception):
            pass

        RayActorError = RayError

    ObjectRef = object

    @staticmethod
    def wait(calls, num_returns=1, timeout=None):
        ready = [call for call in calls if call[0].is_ready and not (call[0].is_stopped and "health" in call)]
        return ready, [call for call in calls if call not in ready]

    @classmethod
    def get(cls, calls, timeout=None):
        for actor, _, _ in calls if isinstance(calls, list) else [calls]:
            if not actor.is_alive:
                raise cls.exceptions.RayError("it has died")
        return IDLE


class Session:
    def __init__(self, killed):
        self.killed = killed

    def kill(self, actor):
        self.killed.append(actor)


class Starter:
    def __init__(self):
        self.endpoints = endpoints([1, 1, 1])
        self.bundles = [{"CPU": 1}] * 3
        self.started = []

    def start(self, number, allocation):
        self.started.append(Actor(number, allocation))
        return self.started[-1]


class Allocations:
    """Processes 0 to 2 are in the placement groups of these numbers; all but ``lost`` are on good nodes."""

    def __init__(self):
        self.placement_groups = {0, 1, 2}
        self.allocations = [Reservation(i, 0) for i in range(3)]
        self.lost = set()
        self.is_short = False
        self.kept = None

    def of(self, number):
        return self.allocations[number]

    def assign(self, number, allocation):
        self.allocations[number] = allocation

    def good_nodes(self):
        return {"good"}

    def node_of(self, allocation):
        return "lost" if allocation.placement_group in self.lost else "good"

    def find(self, mpmd_idx, infos, gone, check, waited):
        return {mpmd_idx: self.allocations[mpmd_idx]}

    def request_spare(self, bundle):
        self.placement_groups.add(10)
        return Reservation(10, 0)

    def give_back(self, others):
        self.kept = {
            allocation.placement_group
            for allocation in (*self.allocations, *others)
            if isinstance(allocation, Reservation)
        }


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(spares, "ray", Ray)
    monkeypatch.setattr(spares, "RaySession", lambda: Session([]))

    def make(num_spares=0):
        reservations = [Reservation(3 + i, 0) for i in range(num_spares)]
        standing_by = Spares(Starter(), Allocations(), reservations)
        standing_by.start_missing()
        return standing_by

    return make


def take_over(standing_by, *numbers):
    return standing_by.take_over(numbers, [], lambda: None)


def test_a_spare_that_is_taken_while_spares_are_counted_hides_no_other_spare(make):
    standing_by = make(num_spares=2)
    taken = iter(standing_by._spares[:1])

    def node_of(allocation):
        for spare in taken:
            standing_by._spares.remove(spare)
        return "good"

    standing_by.allocations.node_of = node_of
    assert standing_by.count_ready() == 2


def test_a_spare_takes_the_place_and_another_one_starts_where_that_was(make):
    standing_by = make(num_spares=1)
    (spare,) = standing_by.starter.started
    assert standing_by.allocations.placement_groups == {0, 1, 2, 3}
    assert take_over(standing_by, 1) == {1: spare}
    assert standing_by.allocations.of(1) == Reservation(3, 0)
    standing_by.start_missing()
    assert standing_by.starter.started[-1].allocation == Reservation(1, 0)
    assert standing_by.allocations.kept == {0, 1, 2, 3}


def test_where_the_node_is_gone_the_next_spare_needs_another_place(make):
    standing_by = make(num_spares=1)
    standing_by.allocations.lost = {1}
    take_over(standing_by, 1)
    standing_by.allocations.is_short = True
    standing_by.start_missing()
    assert len(standing_by.starter.started) == 1, "groups that wait for room go first"
    standing_by.allocations.is_short = False
    standing_by.start_missing()
    assert standing_by.starter.started[-1].allocation == Reservation(10, 0)
    assert standing_by.allocations.kept == {0, 2, 3, 10}


@pytest.mark.parametrize("fault", ["late", "dead", "lost", "stopped"])
def test_a_spare_that_is_not_there_is_not_used(make, fault):
    standing_by = make(num_spares=1)
    (spare,) = standing_by.starter.started
    spare.is_ready, spare.is_alive, spare.is_stopped = fault != "late", fault != "dead", fault == "stopped"
    standing_by.allocations.lost = {3} if fault == "lost" else set()
    assert standing_by.count_ready() == 0
    assert take_over(standing_by, 1)[1] is not spare


@pytest.mark.parametrize("fault", ["dead", "stopped", "lost"])
def test_a_spare_that_is_lost_is_replaced_by_itself(make, monkeypatch, fault):
    monkeypatch.setattr(liveness, "UNRESPONSIVE_SECONDS", 0)
    standing_by = make(num_spares=1)
    (spare,) = standing_by.starter.started
    standing_by.start_missing()
    standing_by.start_missing()
    assert standing_by.starter.started == [spare], "it answers"
    spare.is_alive, spare.is_stopped = fault == "stopped", fault == "stopped"
    standing_by.allocations.lost = {3} if fault == "lost" else set()
    for _ in range(3):
        standing_by.start_missing()
    assert standing_by._session.killed == [spare]
    (_, other) = standing_by.starter.started
    assert other.allocation == Reservation(10 if fault == "lost" else 3, 0)
    assert standing_by.count_ready() == 1
    assert take_over(standing_by, 1) == {1: other}


def test_a_spare_that_starts_slowly_is_waited_for(make, monkeypatch):
    monkeypatch.setattr(liveness, "UNRESPONSIVE_SECONDS", 0)
    standing_by = make(num_spares=1)
    (spare,) = standing_by.starter.started
    spare.is_ready = False
    for _ in range(3):
        standing_by.start_missing()
    assert standing_by.starter.started == [spare]


def test_a_process_that_was_prepared_takes_over_before_spares_do(make):
    standing_by = make(num_spares=1)
    standing_by.prepare({1: SharedDevices("good", 0, ())}, 1.0)
    prepared = standing_by.starter.started[-1]
    assert take_over(standing_by, 1) == {1: prepared}
    assert standing_by.allocations.of(1) == SharedDevices("good", 0, ())
    assert standing_by.count_ready() == 1


def test_a_prepared_process_that_has_died_is_not_used(make):
    standing_by = make()
    standing_by.prepare({1: SharedDevices("good", 0, ())}, 1.0)
    standing_by.starter.started[-1].is_alive = False
    assert take_over(standing_by, 1)[1].allocation == Reservation(1, 0)


def test_prepared_processes_that_are_not_used_end(make):
    standing_by = make()
    standing_by.prepare({1: SharedDevices("good", 0, ())}, 1.0)
    standing_by.discard()
    assert standing_by._session.killed == standing_by.starter.started
    assert take_over(standing_by, 1)[1].allocation == Reservation(1, 0)


def test_an_answer_that_nobody_has_read_for_long_does_not_tell_what_a_process_does_now(make, monkeypatch):
    process, now, limits = spares.Process(Actor(0, None)), [0.0], TimeLimits(stuck_after=10)
    monkeypatch.setattr(spares.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Ray, "get", lambda call: Doing("running bwd_1__3", 7, ActivityKind.TASK, 34.0))
    process.actor.is_ready = False
    assert process.loss(limits) is None
    process.actor.is_ready, now[0] = True, 3600.0
    assert process.loss(limits) is None
    assert process.loss(limits).startswith("is stuck: it is running bwd_1__3")


def test_a_ping_of_an_earlier_wait_does_not_count_in_a_later_one(make, monkeypatch):
    process, now = spares.Process(Actor(0, None)), [0.0]
    monkeypatch.setattr(spares.time, "monotonic", lambda: now[0])
    process.actor.is_ready = False
    assert process.loss() is None
    now[0] = 67.0
    assert process.loss() == "has not answered for 67 s"
    process.forget_ping()
    assert process.loss() is None
