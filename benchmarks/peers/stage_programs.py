"""The compiled stage programs of our plan, without a runtime: the calls of each group, and its messages."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

import mpmd
from benchmarks import model
from benchmarks.workload import Workload
from mpmd.compiler.pipeline import compile_step
from mpmd.compiler.request import CompileRequest
from mpmd.ir.plan import AnyTask, Edge, Free, GroupProgram, Name, Recv, Run, Send
from mpmd.program import arguments, jitted
from mpmd.sharding import to_sharding

Values = dict[Name, jax.Array]
"""The values that a group holds."""


@dataclasses.dataclass
class Call:
    """A run of an executable on a group.

    Attributes:
      receives: the messages to take before it, of each the edge.
      sends: the messages to send after it, of each the edge and the names of its values.
      frees: the names to drop after it.
    """

    task: AnyTask
    group: int
    executable: Callable[..., Sequence[jax.Array]]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    receives: list[Edge]
    sends: list[tuple[Edge, tuple[Name, ...]]]
    frees: list[Name]


class StagePrograms:
    """The plan of ``model.train_step`` with its executables compiled, all for the first device.

    As all groups are on one device, a group sends references.

    Attributes:
      calls: the calls of a step, by the group.
    """

    def __init__(self, workload: Workload):
        devices = np.array(jax.devices()[:1] * workload.groups)
        mesh = mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage")
        self._submesh = mesh.unstack[0]
        args = (model.init_state(workload), *model.batch(workload))
        self._leaves = jax.tree.leaves(args)
        donated = [i < len(self._leaves) - 2 for i in range(len(self._leaves))]  # all but tokens and targets
        compiled = compile_step(
            CompileRequest(
                model.train_step(workload), args, {}, submeshes=mesh.abstract_submeshes, donated=donated
            )
        )
        self.plan = compiled.program.plan
        self._fed_back = compiled.step.fed_back
        self._constants = compiled.program.constants
        self._compiled = {
            e.name: jitted(compiled.program.functions[e.name], e, self._submesh)
            .lower(*arguments(e))
            .compile()
            for e in self.plan.executables
        }
        self.calls = {program.mpmd_idx: self._calls(program) for program in self.plan.programs}
        self._feeds = {group: self._feeds_of(group) for group in self.calls}
        self._feedback = {group: self._feedback_of(group) for group in self.calls}

    def initial_values(self) -> dict[int, Values]:
        """The initial state and the constants, by the group."""
        held = [(leaf.mpmd_idxs, leaf.name, self._constants[leaf.name]) for leaf in self.plan.constants]
        held += [
            (leaf.mpmd_idxs, leaf.name, np.array(value))
            for leaf, value in zip(self.plan.inputs, self._leaves, strict=True)
            if leaf.name
        ]
        return {
            group: {name: self._put(value) for groups, name, value in held if group in groups}
            for group in self.calls
        }

    def _put(self, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, to_sharding((), self._submesh))

    def feed(self, group: int, values: Values) -> None:
        """Puts the batch where the group reads it."""
        for name, value in self._feeds[group]:
            values[name] = self._put(value)

    def _feeds_of(self, group: int) -> list[tuple[Name, np.ndarray]]:
        return [
            (leaf.name, value)
            for leaf, value in zip(self.plan.inputs, self._leaves, strict=True)
            if leaf.name and isinstance(value, np.ndarray) and group in leaf.mpmd_idxs
        ]

    def feed_back(self, group: int, values: Values) -> None:
        """Makes the group's new state its state."""
        for argument, result in self._feedback[group]:
            values[argument] = values[result]

    def _feedback_of(self, group: int) -> list[tuple[Name, Name]]:
        return [
            (name, self.plan.outputs[result].name)
            for argument, result in self._fed_back
            if (name := self.plan.inputs[argument].name) and group in self.plan.inputs[argument].mpmd_idxs
        ]

    def wait(self, values: dict[int, Values]) -> float:
        """Waits for the new state of all groups, and for the loss, which it returns."""
        jax.block_until_ready(
            [values[group][name] for group, fed_back in self._feedback.items() for name, _ in fed_back]
        )
        loss = self.plan.outputs[-1]
        return float(values[loss.mpmd_idxs[0]][loss.name])

    def total_order(self) -> list[tuple[Call, list[tuple[int, tuple[Name, ...]]]]]:
        """All calls, each after the calls that make its inputs, with the receivers of its results."""
        waiting = [collections.deque(calls) for calls in self.calls.values()]
        sent: collections.Counter[Edge] = collections.Counter()
        order = []
        while any(waiting):
            before = len(order)
            for calls in waiting:
                while calls and not (collections.Counter(calls[0].receives) - sent):
                    call = calls.popleft()
                    sent.subtract(call.receives)
                    sent.update(edge for edge, _ in call.sends)
                    order.append((call, [(edge[1], names) for edge, names in call.sends]))
            assert len(order) > before, "the plan was verified, so some group can go on"
        return order

    def _calls(self, program: GroupProgram) -> list[Call]:
        group = program.mpmd_idx
        calls: list[Call] = []
        posted: dict[Edge, collections.deque[Recv]] = collections.defaultdict(collections.deque)
        for instruction in program.instructions:
            match instruction:
                case Run(task, name, inputs, outputs):
                    receives = []
                    for edge, messages in posted.items():
                        # A message that is read, and those that were sent before it.
                        read = [i for i, m in enumerate(messages) if set(m.values) & set(inputs)]
                        for _ in range(max(read, default=-1) + 1):
                            messages.popleft()
                            receives.append(edge)
                    frees = [inputs[i] for i in self.plan.executable(name).donated]
                    executable = self._compiled[name]
                    calls.append(Call(task, group, executable, inputs, outputs, receives, [], frees))
                case Send(values, dst):
                    calls[-1].sends.append(((group, dst), values))
                case Recv(_, src):
                    posted[src, group].append(instruction)
                case Free(values):
                    calls[-1].frees.extend(values)
        assert not any(posted.values()), "a task reads each message of this model"
        return calls
