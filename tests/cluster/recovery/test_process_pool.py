"""Which failures count while groups are replaced, without Ray: each attempt does what the test says."""

from types import SimpleNamespace

import pytest

from cluster.driver.calls.watchdog import Limits
from cluster.protocol.endpoint import endpoints
from cluster.protocol.process_info import Placement, ProcessInfo
from cluster.recovery.allocations import NoAllocationError, NodeGoneError
from cluster.recovery.copies import CopiesLostError
from cluster.recovery.journal import BEGINNING
from cluster.recovery.liveness_waiter import ProcessLostError
from cluster.recovery.process_pool import ProcessPool
from mpmd.errors import RecoveryError
from mpmd.util.stopwatch import Stopwatch


class Allocations:
    has_lost_nodes = False

    def check_nodes(self, numbers):
        if self.has_lost_nodes:
            raise NodeGoneError("the node of process 1 is gone")


class Scripted(ProcessPool):
    """Each attempt raises the next of ``faults``; with the last one gone, it succeeds."""

    def __init__(self, *faults):
        infos = tuple(ProcessInfo(i, 0, "host", "id", 100 + i, (), ()) for i in range(3))
        self.fake_allocations = Allocations()
        starter = SimpleNamespace(members=[SimpleNamespace(endpoint=each) for each in endpoints([1, 1, 1])])
        super().__init__(
            SimpleNamespace(allocations=self.fake_allocations, starter=starter),
            [None] * 3,
            Placement(infos, {}),
            "auto",
            None,
            frozenset(),
            1.0,
            Limits(),
        )
        self._waiter.find_dead = lambda: set()
        self.faults = list(faults)
        self.attempts = []
        self.counted = []

    def _replace(self, dead, loads, snapshot, watch, count_failure):
        self.attempts.append((set(dead), snapshot))
        self._unloaded |= set(dead)
        if self.faults:
            raise self.faults.pop(0)
        return []

    def run(self, dead):
        return self.replace_all(dead, {}, 7, Stopwatch(), self.counted.append)


def test_groups_that_die_while_others_are_replaced_are_one_failure():
    pool = Scripted(ProcessLostError("group 1 has died", 1), ProcessLostError("group 2 has died", 2))
    assert pool.run([0]) == (frozenset([0, 1, 2]), [], None)
    assert pool.attempts == [({0}, 7), ({1}, 7), ({2}, 7)]
    assert pool.counted == []


def test_a_new_process_that_dies_is_a_failure_unless_its_node_is_gone():
    death = ProcessLostError("group 0 has died", 0)
    pool = Scripted(death)
    pool.run([0])
    assert pool.counted == [death]
    pool.faults, pool.fake_allocations.has_lost_nodes = [death], True
    pool.run([0])
    assert pool.counted == [death]


def test_a_fault_without_a_death_and_a_lack_of_places_are_failures():
    fault, shortage = RuntimeError("its devices are in use"), NoAllocationError("no room for group 0")
    pool = Scripted(fault)
    pool.run([0])
    pool.faults, pool.fake_allocations.has_lost_nodes = [shortage], True
    pool.run([0])
    assert pool.counted == [fault, shortage]
    assert pool.attempts == [({0}, 7)] * 4, "the new process may be why, so it is replaced"


def test_without_copies_all_go_back_to_the_beginning_and_it_is_no_further_failure():
    pool = Scripted(CopiesLostError("both have died together"))
    assert pool.run([0, 1]) == (frozenset([0, 1]), [], "both have died together")
    assert pool.attempts == [({0, 1}, 7), (set(), BEGINNING)]
    assert pool.counted == []


def test_giving_up_ends_the_attempts():
    def give_up(failure):
        raise RecoveryError(f"the last time because {failure}", 0)

    pool = Scripted(NoAllocationError("no room"), RuntimeError("never raised"))
    with pytest.raises(RecoveryError, match="because no room"):
        pool.replace_all([0], {}, 7, Stopwatch(), give_up)
    assert len(pool.attempts) == 1
