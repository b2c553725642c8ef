"""Groups that answer requests in their order, in place of the runtime of Ray actors."""

import collections
from concurrent.futures import Future

from cluster.driver.calls.joined import failed
from cluster.recovery.ledger import State
from cluster.recovery.store import Snapshot
from mpmd.errors import GroupDiedError
from mpmd.runtime.requests import Digests
from tests.support.membership_world.answers import digests_of, repeat
from tests.support.membership_world.threads import Awaited


class Group:
    """A group's process, if it has one, and where it runs. It answers requests in order."""

    def __init__(self, place):
        self.place = place
        self.is_alive = self.is_open = self.is_loaded = True
        self.inbox = collections.deque()
        self.chain = ()  # the steps that have made its values
        self.copied = set()  # for storage

    def end(self):
        self.is_alive = False
        self.inbox.clear()


class Groups:
    """In place of the ``RayRuntime``: requests come to the inboxes of groups.

    Attributes:
      pending: the futures of all groups, by request.
      heard: the groups of whose death the driver has heard.
    """

    left_out = frozenset()

    def __init__(self, world, num_groups):
        self.world = world
        self.processes_per_group = (1,) * num_groups
        self.pending = []
        self.heard = {}
        self.is_attached = True

    def ask(self, requests):
        kind = type(next(iter(requests.values())))
        if self.world.processes.stop.is_set():
            return {i: failed(RuntimeError("the mesh was closed")) for i in requests}
        if kind is Digests:
            return self.digests(requests)
        if self.world.ledger.state is State.RECOVERING:
            return {i: repeat(self.world, i, request) for i, request in requests.items()}
        assert self.is_attached
        if dead := self.heard.keys() & requests.keys():
            return {i: failed(self.heard[min(dead)]) for i in requests}
        futures = {i: Awaited(self.world) if kind is Snapshot else Future() for i in requests}
        self.pending.append(futures)
        for i, request in requests.items():
            if self.world.groups[i].is_alive:
                self.world.groups[i].inbox.append((request, futures[i]))
        return futures

    def digests(self, requests):
        self.world.enter("digests")
        died = {i: GroupDiedError(f"group {i} died", i) for i in self.world.dead}
        return {i: failed(died[i]) if i in died else digests_of(self.world, i) for i in requests}

    def hear(self, error):
        self.heard[error.mpmd_idx] = error
        for futures in self.pending:
            if error.mpmd_idx in futures:
                fail(futures.values(), error)

    def detach(self, reason):
        world = self.world
        world.enter("detach")
        assert self.is_attached
        world.claim(not world.ledger.unlogged, "what is not logged was lost")
        self.is_attached = False
        world.unheard.clear()
        for group in world.groups:
            group.inbox.clear()
        for futures in self.pending:
            fail(futures.values(), reason)
        self.pending.clear()

    def attach(self, calls):
        self.heard, self.is_attached = {}, True
        for group in self.world.groups:
            self.world.claim(group.is_open and group.is_loaded, "all were replaced as a whole")

    def death_of(self, mpmd_idx):
        return self.heard.get(mpmd_idx)

    def release(self, *released):
        pass

    unload = release

    def ask_health(self):
        self.world.phases.append(("health", None))

    def close(self):
        for futures in self.pending:
            fail(futures.values(), RuntimeError("closed"))


def fail(futures, error):
    for future in futures:
        if not future.done():
            future.set_exception(error)
