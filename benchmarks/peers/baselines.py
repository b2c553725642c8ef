"""Baselines of the same work: the executables of our own plan, without our runtime."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time

import jax

from benchmarks.peers.stage_programs import Call, StagePrograms
from benchmarks.workload import Setting
from mpmd.ir.events import Event
from mpmd.ir.plan import Edge, Plan


class Sequential:
    """One thread calls the executables of all groups, in an order in which each finds its inputs."""

    def __init__(self, setting: Setting):
        self._programs = StagePrograms(setting.workload)
        self._values = self._programs.initial_values()
        self._order = self._programs.total_order()

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._step()
        return self._programs.wait(self._values)

    def _step(self) -> None:
        values = self._values
        for group in values:
            self._programs.feed(group, values[group])
        for call, receivers in self._order:
            mine = values[call.group]
            results = call.executable(*[mine[name] for name in call.inputs])
            mine.update(zip(call.outputs, results, strict=True))
            for dst, names in receivers:
                values[dst].update((name, mine[name]) for name in names)
            for name in call.frees:
                del mine[name]
        for group in values:
            self._programs.feed_back(group, values[group])


class TaskTimes(Sequential):
    """Waits for each call, and records how long it took."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self._events: list[Event] = []
        self._order = [(self._timed(call), receivers) for call, receivers in self._order]

    def _timed(self, call: Call) -> Call:
        def executable(*inputs):
            start = time.perf_counter()
            results = jax.block_until_ready(call.executable(*inputs))
            self._events.append(Event(call.group, call.task, start, time.perf_counter()))
            return results

        return dataclasses.replace(call, executable=executable)

    def events(self, steps: int) -> list[Event]:
        """Runs steps; returns the times of their tasks."""
        self._events.clear()
        self.run(steps)
        return self._events

    def plan(self) -> Plan:
        return self._programs.plan


class Threads:
    """A thread for each group calls its executables; queues in memory carry the messages of groups."""

    def __init__(self, setting: Setting):
        self._programs = StagePrograms(setting.workload)
        self._values = self._programs.initial_values()
        edges = {edge for calls in self._programs.calls.values() for call in calls for edge, _ in call.sends}
        self._queues: dict[Edge, queue.SimpleQueue] = {edge: queue.SimpleQueue() for edge in edges}
        self._requests: dict[int, queue.SimpleQueue[int]] = {i: queue.SimpleQueue() for i in self._values}
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for group in self._values:
            threading.Thread(target=self._serve, args=[group], daemon=True).start()

    def run(self, steps: int) -> float:
        for requests in self._requests.values():
            requests.put(steps)
        for _ in self._requests:
            if error := self._done.get():
                raise error
        return self._programs.wait(self._values)

    def _serve(self, group: int) -> None:
        while True:
            steps = self._requests[group].get()
            try:
                for _ in range(steps):
                    self._step(group)
            except BaseException as error:  # for the thread that waits
                self._done.put(error)
            else:
                self._done.put(None)

    def _step(self, group: int) -> None:
        mine = self._values[group]
        self._programs.feed(group, mine)
        for call in self._programs.calls[group]:
            for edge in call.receives:
                mine.update(self._queues[edge].get())
            results = call.executable(*[mine[name] for name in call.inputs])
            mine.update(zip(call.outputs, results, strict=True))
            for edge, names in call.sends:
                self._queues[edge].put({name: mine[name] for name in names})
            for name in call.frees:
                del mine[name]
        self._programs.feed_back(group, mine)
