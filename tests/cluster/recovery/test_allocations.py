"""Processes find their nodes when nodes go and come, on a cluster that only pretends."""

import dataclasses

import pytest

from cluster.protocol.process_info import ProcessInfo
from cluster.recovery import allocations as allocations_module
from cluster.recovery.allocations import Allocations, NoAllocationError
from cluster.recovery.report import DRAINED, GROWN, SHRUNK
from cluster.start.resources import Reservation, SharedDevices


@dataclasses.dataclass(eq=False)
class Group:
    """A placement group, and the node of each bundle while it has resources."""

    bundles: list
    avoided: frozenset
    nodes: list | None = None


class Cluster:
    """Nodes with room for some processes each."""

    def __init__(self, **rooms):
        self.rooms = rooms
        self.draining = set()
        self.groups = []

    def request(self, bundles, avoided=()):
        group = Group(list(bundles), frozenset(avoided))
        self.groups.append(group)
        self.schedule()
        return group

    def schedule(self):
        for group in self.groups:
            if group.nodes is None:
                fitting = [
                    node
                    for node in self.rooms
                    if node not in group.avoided | self.draining
                    and self.rooms[node] - self.used(node) >= len(group.bundles)
                ]
                if fitting:
                    group.nodes = [fitting[0]] * len(group.bundles)

    def used(self, node):
        return sum(group.nodes.count(node) for group in self.groups if group.nodes)

    def table(self, group):
        nodes = group.nodes if group.nodes and set(group.nodes) <= set(self.rooms) else None
        return {
            "state": "CREATED" if nodes else "PENDING",
            "bundles_to_node_id": dict(enumerate(nodes or [""] * len(group.bundles))),
        }

    def add(self, node, room=1):
        self.rooms[node] = room
        self.schedule()

    def lose(self, node):
        del self.rooms[node]

    def live_nodes(self):
        return [{"NodeID": node, "Resources": {"CPU": room}} for node, room in self.rooms.items()]


class Session:
    def __init__(self, cluster):
        self.cluster = cluster

    def remove(self, groups):
        for group in groups:
            self.cluster.groups.remove(group)
        self.cluster.schedule()


class Placed(Allocations):
    """Remembers the processes as they were placed first. Nothing waits."""

    def __init__(self, cluster, mpmd_idxs, share_after=0.0):
        own = [Reservation(cluster.request([{"CPU": 1}]), 0) for _ in mpmd_idxs]
        super().__init__(own, [{"CPU": 1}] * len(mpmd_idxs), mpmd_idxs, share_after, timeout=0.0)
        self.before = [
            ProcessInfo(group, 0, "host", self.node_of(self.of(number)), number, ("cpu:0",), ())
            for number, group in enumerate(mpmd_idxs)
        ]

    def settle(self, mpmd_idx, gone=()):
        """Does what a recovery or a move does with the allocations of a group."""
        for number, allocation in self.find(mpmd_idx, self.before, gone, seconds=0.0).items():
            self.assign(number, allocation)
        self.give_back()

    @property
    def nodes(self):
        return "".join(self.node_of(self.of(number)) for number in range(len(self.before)))


@pytest.fixture
def make(monkeypatch):
    def make(cluster, mpmd_idxs, share_after=0.0):
        monkeypatch.setattr(allocations_module, "request", cluster.request)
        monkeypatch.setattr(allocations_module, "placement_group_table", cluster.table)
        monkeypatch.setattr(allocations_module, "live_nodes", cluster.live_nodes)
        monkeypatch.setattr(allocations_module, "draining_nodes", lambda: frozenset(cluster.draining))
        monkeypatch.setattr(allocations_module, "RaySession", lambda: Session(cluster))
        monkeypatch.setattr(allocations_module.ray, "available_resources", lambda: {"CPU": 0})
        return Placed(cluster, mpmd_idxs, share_after)

    return make


def test_a_group_shares_when_its_node_is_gone_and_moves_back_when_there_is_another(make):
    cluster = Cluster(a=1, b=1, c=1)
    allocations = make(cluster, [0, 1, 2])
    assert allocations.find(1, allocations.before, [1]) == {1: allocations.of(1)}, (
        "its process alone has died"
    )
    cluster.lose("b")
    assert allocations.groups_to_move() == {}, "it has died, so it need not move"
    assert allocations.without_node() == {1}
    allocations.settle(1, [1])
    assert allocations.of(1) == SharedDevices("a", 0, ())
    assert allocations.shares_with == {1: 0}
    assert allocations.groups_to_move() == {}
    cluster.add("d")
    assert allocations.groups_to_move() == {1: GROWN}
    allocations.settle(1)
    assert allocations.nodes == "adc"
    assert allocations.groups_to_move() == {} and allocations.shares_with == {}
    assert len(cluster.groups) == 3, "nothing else is reserved"


def test_guests_are_spread_and_do_not_share_with_the_dead_or_with_guests(make):
    cluster = Cluster(a=1, b=1, c=1, d=1)
    allocations = make(cluster, [0, 1, 2, 3])
    cluster.lose("a")
    cluster.lose("b")
    allocations.settle(0, [0, 1])
    allocations.settle(1, [0, 1])
    assert allocations.shares_with == {0: 2, 1: 3}


def test_nobody_shares_with_a_process_that_has_just_moved_and_is_not_known_there(make):
    cluster = Cluster(a=1, b=1, c=1, d=1)
    allocations = make(cluster, [0, 1, 2])
    allocations.assign(0, Reservation(cluster.request([{"CPU": 1}]), 0))
    cluster.lose("b")
    allocations.settle(1, [1])
    assert allocations.shares_with == {1: 2}


def test_what_others_have_waited_for_room_counts_and_ray_gets_its_time(make, monkeypatch):
    times = []
    cluster = Cluster(a=1, b=1)
    allocations = make(cluster, [0, 1], share_after=60.0)
    monkeypatch.setattr(allocations, "_await_own", lambda *arguments: times.append(arguments[2]))
    cluster.lose("b")
    for waited in (0.0, 20.0, 60.0):
        allocations.find(1, allocations.before, [1], waited=waited)
    assert times == [60.0, 40.0, allocations_module.PROMPT_SECONDS]


def test_a_node_that_was_to_end_and_is_still_there_is_used_again(make):
    allocations = make(Cluster(a=1, b=1), [0, 1])
    allocations.avoided = frozenset("b")
    allocations.settle(1)
    assert allocations.shares_with == {1: 0} and allocations.groups_to_move() == {}
    allocations.avoided = frozenset()
    assert allocations.groups_to_move() == {1: GROWN}
    allocations.settle(1)
    assert allocations.nodes == "ab"


def test_where_all_nodes_are_to_end_groups_stay(make):
    cluster = Cluster(a=2)
    allocations = make(cluster, [0, 1])
    cluster.draining.add("a")
    assert allocations.groups_to_move() == {0: DRAINED, 1: DRAINED}
    assert allocations.find(0, allocations.before) == {0: allocations.of(0)}


def test_on_request_groups_share_and_part_again(make):
    cluster = Cluster(a=1, b=1, c=1)
    allocations = make(cluster, [0, 1, 2])
    allocations.num_own = 1
    assert allocations.groups_to_move() == {1: SHRUNK, 2: SHRUNK}
    for mpmd_idx in (1, 2):
        allocations.settle(mpmd_idx)
    assert allocations.shares_with == {1: 0, 2: 0}
    assert len(cluster.groups) == 1, "what is not used is given back"
    assert allocations.groups_to_move() == {}
    allocations.num_own = 2
    assert allocations.groups_to_move() == {1: GROWN}
    allocations.settle(1)
    assert allocations.shares_with == {2: 0}
    allocations.num_own = 1  # the host of the next one is to share, too
    allocations.assign(2, SharedDevices("b", 1, ()))
    assert allocations.groups_to_move() == {1: SHRUNK}
    allocations.settle(1)
    assert allocations.groups_to_move() == {2: SHRUNK}
    allocations.settle(2)
    assert allocations.shares_with == {1: 0, 2: 0}


def test_a_group_that_may_not_share_waits_and_then_fails_with_what_is_missing(make):
    cluster = Cluster(a=1, b=1)
    allocations = make(cluster, [0, 1], share_after=None)
    cluster.lose("b")
    with pytest.raises(
        NoAllocationError, match=r"(?s)no room for group 1 within 0 s, and it may not share.*CPU"
    ):
        allocations.find(1, allocations.before, [1])


def test_a_wait_for_room_ends_when_it_is_no_longer_wanted(make):
    cluster = Cluster(a=1, b=1)
    allocations = make(cluster, [0, 1], share_after=60.0)
    cluster.lose("b")

    def check():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        allocations.find(1, allocations.before, [1], check=check)


def test_the_processes_of_a_group_wait_for_room_together(make):
    cluster = Cluster(a=2, b=2)
    allocations = make(cluster, [0, 0, 1, 1])
    cluster.lose("b")
    allocations.settle(1, [2, 3])
    assert allocations.shares_with == {2: 0, 3: 1}
    cluster.add("c", room=1)
    assert allocations.groups_to_move() == {}
    cluster.lose("c")
    cluster.add("d", room=2)
    assert allocations.groups_to_move() == {1: GROWN}
    allocations.settle(1)
    assert allocations.nodes == "aadd"


def test_spares_have_places_that_are_not_given_back(make):
    cluster = Cluster(a=3)
    allocations = make(cluster, [0, 1])
    spare = allocations.request_spare({"CPU": 1})
    allocations.give_back([spare])
    assert len(cluster.groups) == 3
    allocations.give_back()
    assert len(cluster.groups) == 2
