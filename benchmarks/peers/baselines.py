"""The honest baselines: the executables of our own plan, without our runtime."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time

import jax

from benchmarks.peers.stage_programs import Call, Edge, Group, StagePrograms
from benchmarks.workload import Setting
from mpmd.ir.events import Event
from mpmd.ir.plan import Plan


class Sequential:
    """One thread calls the executables of all groups, in an order in which each finds its inputs."""

    def __init__(self, setting: Setting):
        self._programs = StagePrograms(setting.workload)
        self._order = self._programs.total_order()
        self._table = self._programs.new_table()

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._step()
        return self._programs.wait(self._table)

    def _step(self) -> None:
        table = self._table
        for group in self._programs.groups:
            self._programs.feed(group, table)
        for call, moves in self._order:
            results = call.executable(*[table[slot] for slot in call.inputs])
            for slot, result in zip(call.outputs, results, strict=True):
                table[slot] = result
            for source, target in moves:
                table[target] = table[source]
            for slot in call.frees:
                table[slot] = None
        for group in self._programs.groups:
            self._programs.feed_back(group, table)

    def close(self) -> None:
        pass


class TaskTimes(Sequential):
    """The same, but it waits for each call, and notes how long it took."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self._events: list[Event] = []
        self._order = [(self._timed(call), moves) for call, moves in self._order]

    def _timed(self, call: Call) -> Call:
        def executable(*inputs):
            start = time.perf_counter()
            results = jax.block_until_ready(call.executable(*inputs))
            self._events.append(Event(call.mpmd_idx, call.task, start, time.perf_counter()))
            return results

        return dataclasses.replace(call, executable=executable)

    def events(self, steps: int) -> list[Event]:
        """The times at which the tasks of so many steps ran."""
        self._events.clear()
        self.run(steps)
        return self._events

    def plan(self) -> Plan:
        """The plan whose tasks these are."""
        return self._programs.plan


class Threads:
    """A thread for each group calls its executables; queues in memory carry what groups send."""

    def __init__(self, setting: Setting):
        self._programs = StagePrograms(setting.workload)
        self._table = self._programs.new_table()  # of all groups; each has slots of its own
        self._queues: dict[Edge, queue.SimpleQueue] = {e: queue.SimpleQueue() for e in self._programs.edges()}
        self._requests: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in self._programs.groups]
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=work, daemon=True)
            for work in zip(self._requests, self._programs.groups, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, steps: int) -> float:
        for requests in self._requests:
            requests.put(steps)
        for _ in self._requests:
            if error := self._done.get():
                raise error
        return self._programs.wait(self._table)

    def _serve(self, requests: queue.SimpleQueue, group: Group) -> None:
        while steps := requests.get():
            try:
                for _ in range(steps):
                    self._step(group)
            except BaseException as error:  # for the thread that waits
                self._done.put(error)
            else:
                self._done.put(None)

    def _step(self, group: Group) -> None:
        table, queues = self._table, self._queues
        self._programs.feed(group, table)
        for call in group.calls:
            for edge, slots in call.receives:
                for slot, value in zip(slots, queues[edge].get(), strict=True):
                    table[slot] = value
            results = call.executable(*[table[slot] for slot in call.inputs])
            for slot, result in zip(call.outputs, results, strict=True):
                table[slot] = result
            for edge, slots in call.sends:
                queues[edge].put([table[slot] for slot in slots])
            for slot in call.frees:
                table[slot] = None
        self._programs.feed_back(group, table)

    def close(self) -> None:
        for requests in self._requests:
            requests.put(0)
        for thread in self._threads:
            thread.join()
