"""The compiled stage programs of our plan, bare: what each group calls on what, and what it hands over."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

import mpmd
from benchmarks import model
from benchmarks.workload import Workload
from mpmd.compiler.pipeline import CompiledStep, compile_step
from mpmd.compiler.request import CompileRequest
from mpmd.ir.plan import AnyTask, Edge, Free, GroupProgram, Name, Recv, Run, Send
from mpmd.program import arguments, jitted
from mpmd.sharding import to_sharding

Slot = int
"""The slot in which a group has a value, in one table for all groups."""


@dataclasses.dataclass
class Call:
    """A run of an executable with what has to be received before it, and sent and dropped after it."""

    task: AnyTask
    mpmd_idx: int
    executable: Callable[..., Sequence[jax.Array]]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    receives: list[tuple[Edge, tuple[Slot, ...]]]
    sends: list[tuple[Edge, tuple[Slot, ...]]]
    frees: list[Slot]


@dataclasses.dataclass(frozen=True)
class Group:
    """A group's program of a step: put the batch into slots, call, and make the new state the old one."""

    calls: list[Call]
    feeds: list[tuple[Slot, np.ndarray]]
    feedback: list[tuple[Slot, Slot]]


class StagePrograms:
    """The plan of ``model.train_step`` with its executables compiled, all for the first device.

    All groups being on one device, what one sends another one is a reference.
    """

    def __init__(self, workload: Workload):
        devices = np.array(jax.devices()[:1] * workload.groups)
        mesh = mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage")
        self._submesh = mesh.unstack[0]
        state, batch = model.init_state(workload), model.batch(workload)
        self._leaves = jax.tree.leaves((state, *batch))
        num_state = len(jax.tree.leaves(state))
        donated = [i < num_state for i in range(len(self._leaves))]
        args = (state, *batch)
        compiled = compile_step(
            CompileRequest(
                model.train_step(workload), args, {}, submeshes=mesh.abstract_submeshes, donated=donated
            )
        )
        self.plan = compiled.program.plan
        self._slots: dict[tuple[int, Name], Slot] = {}
        self._compiled = {
            e.name: jitted(compiled.program.functions[e.name], e, self._submesh)
            .lower(*arguments(e))
            .compile()
            for e in self.plan.executables
        }
        self._constants = compiled.program.constants
        self.groups = [self._group(program, compiled) for program in self.plan.programs]
        loss = self.plan.outputs[-1]
        self._results = [slot for group in self.groups for slot, _ in group.feedback]
        self._loss = self._slots[loss.mpmd_idxs[0], loss.name]

    def new_table(self) -> list[jax.Array | None]:
        """A table with the initial state and the constants in their slots."""
        table: list[jax.Array | None] = [None] * len(self._slots)
        held = [(leaf.mpmd_idxs, leaf.name, self._constants[leaf.name]) for leaf in self.plan.constants]
        held += [
            (leaf.mpmd_idxs, leaf.name, np.array(value))
            for leaf, value in zip(self.plan.inputs, self._leaves, strict=True)
            if leaf.name
        ]
        for mpmd_idxs, name, value in held:
            for mpmd_idx in mpmd_idxs:
                table[self._slot(mpmd_idx, name)] = self._put(value)
        return table

    def _put(self, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, to_sharding((), self._submesh))

    def feed(self, group: Group, table: list) -> None:
        """Puts the batch where the group reads it."""
        for slot, value in group.feeds:
            table[slot] = self._put(value)

    def feed_back(self, group: Group, table: list) -> None:
        """Makes the group's new state its state."""
        for argument, result in group.feedback:
            table[argument] = table[result]

    def edges(self) -> set[Edge]:
        """The pairs of groups of which the first sends to the second."""
        return {edge for group in self.groups for call in group.calls for edge, _ in call.sends}

    def wait(self, table: list) -> float:
        """Waits for the state in a table, and for the loss, which it returns."""
        jax.block_until_ready([table[slot] for slot in self._results])
        return float(table[self._loss])

    def total_order(self) -> list[tuple[Call, list[tuple[Slot, Slot]]]]:
        """All calls, each after those that make its inputs, and the slots to copy after it: its messages."""
        waiting = [collections.deque(group.calls) for group in self.groups]
        sent: dict[Edge, collections.deque] = collections.defaultdict(collections.deque)
        order: list[tuple[Call, list[tuple[Slot, Slot]]]] = []

        def receive(call: Call) -> None:
            for edge, slots in call.receives:
                moves, values = sent[edge].popleft()
                moves.extend(zip(values, slots, strict=True))

        def is_ready(call: Call) -> bool:
            needed = collections.Counter(edge for edge, _ in call.receives)
            return all(len(sent[edge]) >= count for edge, count in needed.items())

        while any(waiting):
            before = len(order)
            for calls in waiting:
                while calls and is_ready(calls[0]):
                    call = calls.popleft()
                    receive(call)
                    moves: list[tuple[Slot, Slot]] = []
                    order.append((call, moves))
                    for edge, slots in call.sends:
                        sent[edge].append((moves, slots))
            assert len(order) > before, "the plan was verified, so some group can go on"
        return order

    def _slot(self, mpmd_idx: int, name: Name) -> Slot:
        return self._slots.setdefault((mpmd_idx, name), len(self._slots))

    def _group(self, program: GroupProgram, compiled: CompiledStep) -> Group:
        here, plan = program.mpmd_idx, self.plan
        feeds = [
            (self._slot(here, leaf.name), value)
            for leaf, value in zip(plan.inputs, self._leaves, strict=True)
            if leaf.name and isinstance(value, np.ndarray) and here in leaf.mpmd_idxs
        ]
        feedback = [
            (self._slot(here, name), self._slot(here, plan.outputs[result].name))
            for argument, result in compiled.step.fed_back
            if (name := plan.inputs[argument].name) and here in plan.inputs[argument].mpmd_idxs
        ]
        return Group(self._calls(program), feeds, feedback)

    def _calls(self, program: GroupProgram) -> list[Call]:
        here = program.mpmd_idx
        calls: list[Call] = []
        posted: dict[Edge, collections.deque[Recv]] = collections.defaultdict(collections.deque)

        def slots(names: Sequence[Name]) -> tuple[Slot, ...]:
            return tuple(self._slot(here, name) for name in names)

        for instruction in program.instructions:
            match instruction:
                case Run(task, executable, inputs, outputs):
                    receives = []
                    for edge, messages in posted.items():
                        # A message that is read, and those that were sent before it.
                        last = max(
                            (i for i, m in enumerate(messages) if set(m.values) & set(inputs)), default=-1
                        )
                        for _ in range(last + 1):
                            receives.append((edge, slots(messages.popleft().values)))
                    frees = [slots(inputs)[i] for i in self.plan.executable(executable).donated]
                    call = self._compiled[executable]
                    calls.append(Call(task, here, call, slots(inputs), slots(outputs), receives, [], frees))
                case Send(values, dst):
                    calls[-1].sends.append(((here, dst), slots(values)))
                case Recv(_, src):
                    posted[src, here].append(instruction)
                case Free(values):
                    calls[-1].frees.extend(slots(values))
        assert not any(posted.values()), "what is received in this model is read by a task"
        return calls
