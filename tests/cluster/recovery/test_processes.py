"""The processes of a mesh that recovers, with actors that only pretend."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray

from cluster.driver.calls.liveness import TimeLimits
from cluster.protocol.process_info import ProcessInfo, ProcessPlacement
from cluster.recovery import processes as processes_module
from cluster.recovery.processes import Processes, SupersededError
from cluster.recovery.report import DRAINED, GROWN, REPLACED
from cluster.start.connect import Connected, StartingActors
from cluster.start.resources import Reservation, SharedDevices
from mpmd.errors import GroupDiedError
from mpmd.runtime.activity import ActivityKind, Doing
from tests.support.processes import endpoints

INFOS = [ProcessInfo(i, 0, "host", f"node {i}", 100 + i, (), ()) for i in range(3)]


class Allocations:
    """Process 2 shares the devices of process 0. ``found`` are other allocations than these."""

    def __init__(self):
        self.placement_groups = set()
        self.avoided = frozenset()
        self.found = {}

    def of(self, number):
        return SharedDevices("node 0", 0, ()) if number == 2 else Reservation(number, 0)

    def find(self, mpmd_idx, infos, seconds, check):
        return {mpmd_idx: self.found.get(mpmd_idx, self.of(mpmd_idx))}

    def groups_to_move(self):
        return {}


class Spares:
    def __init__(self):
        self.allocations = Allocations()
        self.starter = SimpleNamespace(endpoints=endpoints([1, 1, 1]))
        self.num_ready = 0
        self.prepared = {}

    def count_ready(self):
        return self.num_ready

    def prepare(self, allocations, timeout):
        self.prepared |= allocations


class Process:
    """In place of an actor with its pings. ``how`` says how it is lost."""

    def __init__(self, actor):
        self.actor = actor
        self.how = None
        self.is_told = False

    def loss(self, limits):
        return self.how

    def forget_ping(self):
        pass

    def is_told_to_end(self):
        return self.is_told


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(processes_module, "Process", Process)
    started = StartingActors(["actor"] * 3, endpoints([1, 1, 1]), 9.0)
    topology = SimpleNamespace(gathering=frozenset())
    connected = Connected(topology, ProcessPlacement(tuple(INFOS), {}), [])
    return Processes(Spares(), started, connected, "auto", None, TimeLimits())


def test_processes_that_share_devices_say_with_which_group(processes, monkeypatch):
    monkeypatch.setattr(processes_module, "open_groups", lambda actors, versions: INFOS[1:])
    processes.open({1, 2})
    assert [info.shares_with for info in processes.infos] == [None, None, 0]


def test_a_process_that_is_lost_is_the_death_of_its_group(processes):
    processes.check_alive(range(3))
    processes._processes[1].how = "has not answered for 61 s"
    with pytest.raises(GroupDiedError, match="group 1 has not answered for 61 s") as caught:
        processes.check_alive(range(3))
    assert caught.value.mpmd_idx == 1


def test_a_process_that_ray_has_killed_for_lack_of_memory_is_dead(processes, monkeypatch):
    def get(ping, timeout):
        if ping == 1:
            raise ray.exceptions.OutOfMemoryError("memory on the node was low")
        return Doing("idle", None, ActivityKind.OTHER, 0.0)

    for number, process in enumerate(processes._processes):
        process.actor = SimpleNamespace(health=SimpleNamespace(remote=lambda number=number: number))
    monkeypatch.setattr(
        processes_module, "ray", SimpleNamespace(wait=Mock(), get=get, exceptions=ray.exceptions)
    )
    assert processes.find_dead() == {1}


def test_nothing_goes_on_when_the_mesh_was_closed(processes):
    processes.check_open()
    processes.stop.set()
    with pytest.raises(SupersededError):
        processes.check_open()


def test_the_nodes_of_processes_that_are_told_to_end_are_avoided_for_a_time(processes, monkeypatch):
    processes._processes[1].is_told = True
    processes.groups_to_move()
    assert processes.allocations.avoided == {"node 1"}
    processes._processes[1].is_told = False
    monkeypatch.setattr(processes_module, "_AVOID_SECONDS", 0.0)
    processes.groups_to_move()
    assert processes.allocations.avoided == frozenset()


def test_a_group_moves_to_a_spare_to_another_place_or_to_another_process_when_it_has_to(processes):
    assert not processes.prepare_move(1, GROWN), "there is no better place"
    processes.spares.num_ready = 1
    assert processes.prepare_move(1, DRAINED) and processes.spares.prepared == {}
    processes.spares.num_ready = 0
    assert not processes.prepare_move(1, DRAINED)
    processes._processes[1].is_told = True
    assert processes.prepare_move(1, DRAINED) and processes.spares.prepared == {}, "it starts again here"
    processes.allocations.found = {1: Reservation(7, 0)}
    assert processes.prepare_move(1, GROWN) and processes.spares.prepared == {1: Reservation(7, 0)}
    assert processes.prepare_move(2, REPLACED), "a dead group needs another process wherever it is"
    assert processes.spares.prepared[2] == SharedDevices("node 0", 0, ())
