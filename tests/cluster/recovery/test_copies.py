"""Copies of values that have changed where they are kept, or on their way, are not used."""

import collections
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cluster.protocol.process_info import ProcessInfo
from cluster.recovery import copies as copies_module
from cluster.recovery.actor import RecoverableActor
from cluster.recovery.copies import Copies, CopiesLostError
from cluster.recovery.journal import BEGINNING
from cluster.recovery.store import DamagedCopyError, SnapshotStore
from tests.support.processes import endpoints

SUBMESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
INFOS = [ProcessInfo(i, 0, "host", "id", 100 + i, (), ()) for i in range(3)]
FIRST, SECOND = 1, 2


class Process:
    """An actor's values and stores in a process. Calls of it are answered at once."""

    def __init__(self, endpoint):
        self.values = {}
        self._stores = collections.defaultdict(SnapshotStore)
        self._endpoint = endpoint
        self._worker = SimpleNamespace(submesh=SUBMESH, replace_values=self.values.update)
        self.on_the_way = lambda chunk: chunk

    def __getattr__(self, name):
        method = getattr(RecoverableActor, name)
        return SimpleNamespace(remote=lambda *arguments: Reply(method(self, *arguments)))

    def store(self, owner):
        return self._stores[owner]


class Reply:
    """A call of Ray that has been answered."""

    def __init__(self, value):
        self.value = value


@pytest.fixture
def processes(monkeypatch):
    """Of three groups, each with a value under its number and with the first snapshot committed."""

    def get(replies):
        return [reply.value for reply in replies] if isinstance(replies, list) else replies.value

    monkeypatch.setattr(copies_module.ray, "get", get)
    processes = [Process(endpoint) for endpoint in endpoints([1, 1, 1])]
    for number, process in enumerate(processes):
        own = jax.device_put(np.full(8, number, "float32"), NamedSharding(SUBMESH, P()))
        process.store(number).take(FIRST, {number: own}, SUBMESH)
    return processes


@pytest.fixture
def copies(processes, monkeypatch):
    # What a call hands over arrives as it is in the process that made it.
    unpacked = RecoverableActor.keep
    monkeypatch.setattr(
        RecoverableActor,
        "keep",
        lambda self, *arguments: unpacked(self, *arguments[:-1], arguments[-1].value),
    )
    copies = Copies(
        SimpleNamespace(
            actors=processes,
            endpoints=endpoints([1, 1, 1]),
            infos=INFOS,
            wait_for=lambda calls, *options, **named: None,
        )
    )
    copies.copy_away(FIRST, BEGINNING, lambda: True)
    copies.mark_committed()
    return copies


def spoil(process, owner):
    ((_, part),) = process.store(owner).values(FIRST)[owner].shards
    part[5] ^= 1


def test_a_damaged_copy_is_named_and_another_one_is_used(processes, copies, capsys):
    spoil(processes[1], owner=1)
    copies.check(FIRST)
    assert (
        "group 1 has a damaged copy of value 1 of group 1, whose bytes have changed"
        in capsys.readouterr().err
    )
    copies.restore(FIRST)
    np.testing.assert_array_equal(processes[1].values[1], np.full(8, 1, "float32"))
    copies.check(FIRST)
    assert not capsys.readouterr().err, "the good copy has taken its place"


def test_without_a_good_copy_the_values_are_lost(processes, copies):
    copies.lose([0])
    spoil(processes[1], owner=0)  # the next group keeps them
    for _ in range(2):  # as often as a replacement is tried
        with pytest.raises(
            CopiesLostError, match="group 1 has a damaged copy of value 0 of group 0, and there"
        ):
            copies.check(FIRST)


def test_a_copy_that_both_have_lost_says_so(copies):
    copies.lose([0, 1])
    with pytest.raises(
        CopiesLostError, match="group 0 and group 1, which kept its values, have died together"
    ):
        copies.check(FIRST)


def test_what_changes_on_its_way_is_not_kept(processes, copies):
    spoil(processes[1], owner=1)
    with pytest.raises(DamagedCopyError, match="group 2 cannot keep values of group 1: value 1 arrived with"):
        copies.copy_away(FIRST, BEGINNING, lambda: True)
