"""Processes, copies, spares and places of groups, whose methods are phases of a recovery."""

import threading

from cluster.protocol.process_info import ProcessInfo
from cluster.recovery.processes import SupersededError
from cluster.recovery.report import SHRUNK
from tests.support.membership_world.groups import Group


class Processes:
    """In place of ``Processes``, ``Copies``, ``Spares`` and ``Allocations``. Its methods are phases."""

    def __init__(self, world):
        self.world = world
        self.allocations = self.spares = self
        self.stop = threading.Event()
        self.num_own, self.can_share = len(world.groups), True

    @property
    def infos(self):
        shares_with = self.world.shares_with
        return [
            ProcessInfo(i, 0, "host", "id", 100 + i, (), (), shares_with=shares_with.get(i))
            for i in range(len(self.world.groups))
        ]

    def calls(self, connections, on_death):
        self.on_death = on_death

    def kill(self, groups):
        self.world.enter("kill", set(groups))
        for mpmd_idx in groups:
            self.world.groups[mpmd_idx].end()
            self.world.groups[mpmd_idx].is_open = False
        self.world.resetting = self.world.resetting - set(groups)
        return list(groups)

    def lose(self, *numbers):
        pass

    def mark_committed(self):
        self.world.phases.append(("mark_committed", self.world.journal.committed))

    def reset(self, but, programs):
        self.world.enter("reset")
        self.world.resetting = set(range(len(self.world.groups))) - but
        are_open = all(self.world.groups[mpmd_idx].is_open for mpmd_idx in self.world.resetting)
        self.world.claim(are_open, "a process that has no connections is reset")

    def start(self, groups):
        self.world.enter("start", set(groups))
        self.check_open()
        for mpmd_idx in groups:
            group = self.world.groups[mpmd_idx]
            self.world.claim(not group.is_alive, "a group has two processes of a rank")
            place = self.world.prepared.pop(mpmd_idx, group.place)
            self.world.claim(place in self.world.places, "the place was given back")
            self.world.groups[mpmd_idx] = group = Group(place)
            group.is_open = group.is_loaded = False

    def open(self, groups):
        self.world.enter("open", set(groups))
        self.check_open()
        self.world.check_alive(groups, RuntimeError("it could not start"))
        for mpmd_idx in groups:
            self.world.claim(not self.world.groups[mpmd_idx].is_open, "a process takes its devices twice")
            self.world.groups[mpmd_idx].is_open = True

    def check_open(self):
        if self.stop.is_set():
            raise SupersededError

    def await_reset(self):
        self.world.enter("await_reset")
        self.world.check_alive(self.world.resetting)

    def check(self, snapshot):
        self.world.enter("check", snapshot)
        self.world.check_alive()
        return self.world.damaged

    def go_back(self, snapshot):
        damaged = self.check(snapshot)
        self.restore(snapshot)
        return damaged

    def connect(self):
        self.world.enter("connect")
        self.world.check_alive()
        self.world.claim(all(group.is_open for group in self.world.groups), "some have no devices")
        return []

    def load(self, groups, loads):
        self.world.enter("load", set(groups))
        self.world.check_alive(groups)
        for mpmd_idx in groups:
            self.world.groups[mpmd_idx].is_loaded = True

    def restore(self, snapshot):
        self.world.enter("restore", snapshot)
        self.world.check_alive(self.world.logged)
        for mpmd_idx in self.world.logged:
            self.world.groups[mpmd_idx].chain = self.world.copies[snapshot][mpmd_idx]
            self.world.groups[mpmd_idx].copied.clear()

    def copy_away(self, snapshot, base, is_wanted):
        self.world.enter("copy_away")
        if not is_wanted():
            raise SupersededError
        self.world.check_alive(self.world.logged)

    def find_dead(self):
        self.world.enter("find_dead")
        return self.world.dead | self.world.silent

    def without_node(self):
        return {0} if self.world.gone else set()

    def groups_to_move(self):
        self.world.enter("look")
        self.world.places.add(next(self.world.numbers))
        return self.world.kinds

    def prepare_move(self, mpmd_idx, kind):
        self.world.enter("prepare")
        self.check_open()
        if self.world.has_place:
            self.world.prepared[mpmd_idx] = next(self.world.numbers)
            self.world.places.add(self.world.prepared[mpmd_idx])
            self.world.shares_with[mpmd_idx] = 0 if kind == SHRUNK else None
        return self.world.has_place

    def discard(self):
        self.world.prepared.clear()  # also if one cannot be killed: Ray ends a process that nobody has
        self.world.enter("discard")

    def start_missing(self):
        self.world.enter("start_spares")
        self.world.places = {group.place for group in self.world.groups} | set(self.world.prepared.values())

    def release(self):
        self.stop.set()
        for group in self.world.groups:
            group.end()
        self.world.places.clear()
        self.world.prepared.clear()
