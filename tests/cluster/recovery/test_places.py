"""Where processes go when nodes go and come, on a cluster that only pretends."""

import dataclasses

import pytest

from cluster.protocol.process_info import ProcessInfo
from cluster.recovery import places as places_module
from cluster.recovery.places import NodeGoneError, NoPlaceError, Places
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


@pytest.fixture
def make(monkeypatch):
    def make(cluster, mpmd_idxs, share_after=0.0, timeout=0.0):
        monkeypatch.setattr(places_module, "request", cluster.request)
        monkeypatch.setattr(places_module, "placement_group_table", cluster.table)
        monkeypatch.setattr(places_module, "live_nodes", cluster.live_nodes)
        monkeypatch.setattr(places_module, "draining_nodes", lambda: frozenset(cluster.draining))
        monkeypatch.setattr(places_module, "RaySession", lambda: Session(cluster))
        monkeypatch.setattr(places_module.ray, "available_resources", lambda: {"CPU": 0})
        own = [Reservation(cluster.request([{"CPU": 1}]), 0) for _ in mpmd_idxs]
        return Places(own, [{"CPU": 1}] * len(mpmd_idxs), mpmd_idxs, share_after, timeout)

    return make


def infos(places, mpmd_idxs):
    return [
        ProcessInfo(group, 0, "host", places.node_of(places.of(number)), number, ("cpu:0",), ())
        for number, group in enumerate(mpmd_idxs)
    ]


def settle(places, before, mpmd_idx, gone=()):
    """Does what a recovery or a move does with the places of a group."""
    for number, place in places.find(mpmd_idx, before, gone, seconds=0.0).items():
        places.assign(number, place)
    places.give_back()


def nodes(places, count):
    return "".join(places.node_of(places.of(number)) for number in range(count))


def test_a_group_shares_when_its_node_is_gone_and_moves_back_when_there_is_another(make):
    cluster = Cluster(a=1, b=1, c=1)
    places = make(cluster, [0, 1, 2])
    before = infos(places, [0, 1, 2])
    assert places.find(1, before, [1]) == {1: places.of(1)}, "its process alone has died"
    cluster.lose("b")
    assert places.misplaced() == {}, "it has died, so it need not move"
    with pytest.raises(NodeGoneError):
        places.check_nodes([0, 1])
    settle(places, before, 1, [1])
    assert places.of(1) == SharedDevices("a", 0, ())
    assert places.shares_with == {1: 0}
    assert places.misplaced() == {}
    cluster.add("d")
    assert places.misplaced() == {1: GROWN}
    settle(places, before, 1)
    assert nodes(places, 3) == "adc"
    assert places.misplaced() == {} and places.shares_with == {}
    assert len(cluster.groups) == 3, "nothing else is reserved"


def test_a_group_whose_node_is_gone_takes_another_one_with_room(make):
    cluster = Cluster(a=1, b=1, c=1)
    places = make(cluster, [0, 1])
    before = infos(places, [0, 1])
    cluster.lose("b")
    settle(places, before, 1, [1])
    assert nodes(places, 2) == "ac"
    assert len(cluster.groups) == 2


def test_guests_are_spread_and_do_not_share_with_the_dead_or_with_guests(make):
    cluster = Cluster(a=1, b=1, c=1, d=1)
    places = make(cluster, [0, 1, 2, 3])
    before = infos(places, [0, 1, 2, 3])
    cluster.lose("a")
    cluster.lose("b")
    settle(places, before, 0, [0, 1])
    settle(places, before, 1, [0, 1])
    assert places.shares_with == {0: 2, 1: 3}


def test_nobody_shares_with_a_process_that_has_just_moved_and_is_not_known_there(make):
    cluster = Cluster(a=1, b=1, c=1, d=1)
    places = make(cluster, [0, 1, 2])
    before = infos(places, [0, 1, 2])
    places.assign(0, Reservation(cluster.request([{"CPU": 1}]), 0))
    cluster.lose("b")
    settle(places, before, 1, [1])
    assert places.shares_with == {1: 2}


def test_what_others_have_waited_for_room_counts_and_ray_gets_its_time(make, monkeypatch):
    times = []
    cluster = Cluster(a=1, b=1)
    places = make(cluster, [0, 1], share_after=60.0)
    before = infos(places, [0, 1])
    monkeypatch.setattr(places, "_await_own", lambda *arguments: times.append(arguments[2]))
    cluster.lose("b")
    for waited in (0.0, 20.0, 60.0):
        places.find(1, before, [1], waited=waited)
    assert times == [60.0, 40.0, places_module.PROMPT_SECONDS]


@pytest.mark.parametrize("by_ray", [True, False])
def test_groups_leave_nodes_that_are_to_end(make, by_ray):
    cluster = Cluster(a=1, b=1)
    places = make(cluster, [0, 1])
    before = infos(places, [0, 1])
    if by_ray:
        cluster.draining.add("a")
    else:
        places.avoided = frozenset("a")
    assert places.misplaced() == {0: DRAINED}
    settle(places, before, 0)
    assert places.shares_with == {0: 1} and places.misplaced() == {}
    cluster.add("c")
    assert places.misplaced() == {0: GROWN}
    settle(places, before, 0)
    assert nodes(places, 2) == "cb"


def test_a_node_that_was_to_end_and_is_still_there_is_used_again(make):
    places = make(Cluster(a=1, b=1), [0, 1])
    before = infos(places, [0, 1])
    places.avoided = frozenset("b")
    settle(places, before, 1)
    assert places.shares_with == {1: 0} and places.misplaced() == {}
    places.avoided = frozenset()
    assert places.misplaced() == {1: GROWN}
    settle(places, before, 1)
    assert nodes(places, 2) == "ab"


def test_where_all_nodes_are_to_end_groups_stay(make):
    cluster = Cluster(a=2)
    places = make(cluster, [0, 1])
    before = infos(places, [0, 1])
    cluster.draining.add("a")
    assert places.misplaced() == {0: DRAINED, 1: DRAINED}
    assert places.find(0, before) == {0: places.of(0)}


def test_on_request_groups_share_and_part_again(make):
    cluster = Cluster(a=1, b=1, c=1)
    places = make(cluster, [0, 1, 2])
    before = infos(places, [0, 1, 2])
    places.num_own = 1
    assert places.misplaced() == {1: SHRUNK, 2: SHRUNK}
    for mpmd_idx in (1, 2):
        settle(places, before, mpmd_idx)
    assert places.shares_with == {1: 0, 2: 0}
    assert len(cluster.groups) == 1, "what is not used is given back"
    assert places.misplaced() == {}
    places.num_own = 2
    assert places.misplaced() == {1: GROWN}
    settle(places, before, 1)
    assert places.shares_with == {2: 0}
    places.num_own = 1  # the host of the next one is to share, too
    places.assign(2, SharedDevices("b", 1, ()))
    assert places.misplaced() == {1: SHRUNK}
    settle(places, before, 1)
    assert places.misplaced() == {2: SHRUNK}
    settle(places, before, 2)
    assert places.shares_with == {1: 0, 2: 0}


def test_a_group_that_may_not_share_waits_and_then_fails_with_what_is_missing(make):
    cluster = Cluster(a=1, b=1)
    places = make(cluster, [0, 1], share_after=None)
    before = infos(places, [0, 1])
    cluster.lose("b")
    with pytest.raises(NoPlaceError, match=r"(?s)no room for group 1 within 0 s, and it may not share.*CPU"):
        places.find(1, before, [1])


def test_a_wait_for_room_ends_when_it_is_no_longer_wanted(make):
    cluster = Cluster(a=1, b=1)
    places = make(cluster, [0, 1], share_after=60.0)
    before = infos(places, [0, 1])
    cluster.lose("b")

    def check():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        places.find(1, before, [1], check=check)


def test_the_processes_of_a_group_wait_for_room_together(make):
    cluster = Cluster(a=2, b=2)
    places = make(cluster, [0, 0, 1, 1])
    before = infos(places, [0, 0, 1, 1])
    cluster.lose("b")
    settle(places, before, 1, [2, 3])
    assert places.shares_with == {2: 0, 3: 1}
    cluster.add("c", room=1)
    assert places.misplaced() == {}
    cluster.lose("c")
    cluster.add("d", room=2)
    assert places.misplaced() == {1: GROWN}
    settle(places, before, 1)
    assert nodes(places, 4) == "aadd"


def test_spares_have_places_that_are_not_given_back(make):
    cluster = Cluster(a=3)
    places = make(cluster, [0, 1])
    spare = places.request_spare({"CPU": 1})
    places.give_back([spare])
    assert len(cluster.groups) == 3
    places.give_back()
    assert len(cluster.groups) == 2
