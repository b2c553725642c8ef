"""The workload of a compiled plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mpmd.ir.messages import Messages, first_uses, sends_of
from mpmd.ir.plan import (
    AnyTask,
    Cell,
    Edge,
    Free,
    GroupProgram,
    MessageKey,
    Name,
    OutsideTask,
    Plan,
    Run,
    Send,
)
from mpmd.ir.routes import Routes, Topology
from mpmd.memory import sizes_on_devices
from mpmd.simulate.costs import Costs, types_of
from mpmd.simulate.workload import DeadlockError, Instant, MessageTable, Workload

MessageBytes = Callable[[Edge, Name], float]
"""The bytes of a value on the link of an edge."""


def plan_workload(plan: Plan, costs: Costs, sizes: Topology | MessageBytes | None = None) -> Workload:
    """The operations of a plan: its runs.

    A receive only posts: the first reader of one of its values waits for the message, and the end of the step
    waits for the step's results. Memory is the bytes on each device of a group: values, counted as ``verify``
    counts them, XLA's temporaries if the groups have compiled, and messages that have been sent to the group.
    Every step starts with the arguments and constants.

    Args:
      sizes: the bytes of messages: the bytes that travel between the processes of a topology, or a function;
        ``None``: the bytes of the message's values, unsharded.

    Raises: ``ValueError`` for a kind of task without a time, ``DeadlockError`` for a message that is sent
      and not received, or received and not sent.
    """
    builder = _WorkloadBuilder(plan, costs, _message_bytes(plan, sizes))
    for program in plan.programs:
        builder.add(program)
    return builder.workload()


def message_keys(plan: Plan) -> tuple[MessageKey, ...]:
    """The edge and the tag of each message of ``plan_workload``, by its number."""
    return tuple(dict.fromkeys((edge, send.tag) for edge, send in sends_of(plan)))


def _message_bytes(plan: Plan, sizes: Topology | MessageBytes | None) -> MessageBytes:
    if isinstance(sizes, Topology):
        routes = Routes(plan, sizes)
        return lambda edge, name: routes.of_value(edge, name).nbytes
    whole = {name: aval.nbytes for name, aval in plan.avals().items()}
    return sizes or (lambda edge, name: whole[name])


class _WorkloadBuilder:
    """The workload of the programs so far.

    For each message, ``_sent`` has the sender and the size, and ``_readers`` the first operation that needs
    the message and the bytes of its values on each device of the receiver. ``_sizes`` has the bytes of values
    on each device of the group that is added.
    """

    def __init__(self, plan: Plan, costs: Costs, message_bytes: MessageBytes):
        self._plan = plan
        self._costs = costs
        self._message_bytes = message_bytes
        self._sizes: Mapping[Name, int] = {}
        tasks = (run.task for program in plan.programs for run in program.runs)
        cells = (task for task in tasks if isinstance(task, Cell))
        self._alone = costs.times({member for cell in cells for member in types_of(cell)})
        self._tasks: list[AnyTask | Instant] = []
        self._workload = Workload(
            costs=costs,
            bounds=[0],
            tasks=self._tasks,
            durations=[],
            at_start=[],
            at_end=[],
            resident=[],
            messages=MessageTable(),
            loops=plan.loops,
        )
        self._sent: dict[MessageKey, tuple[int, float]] = {}
        self._readers: dict[MessageKey, tuple[int, float]] = {}

    def add(self, program: GroupProgram) -> None:
        group = program.mpmd_idx
        self._sizes = sizes_on_devices(self._plan, group)
        self._workload.resident.append(self._bytes(self._plan.resident(group)))
        self._add_operation(Instant("the arguments"), {})
        *uses, at_end = first_uses(program)
        for instruction, messages in zip(program.instructions, uses, strict=True):
            if isinstance(instruction, Run):
                self._add_run(instruction, messages, group)
            elif messages:
                self._add_operation(Instant(", ".join(instruction.values)), messages)
            if isinstance(instruction, Send):
                edge = group, instruction.dst
                nbytes = sum(self._message_bytes(edge, name) for name in instruction.values)
                self._sent[edge, instruction.tag] = len(self._tasks) - 1, nbytes
            elif isinstance(instruction, Free):
                self._workload.at_end[-1] += (-self._bytes(instruction.values),)
        self._add_operation(Instant("the end of the step"), at_end)
        self._workload.bounds.append(len(self._tasks))

    def workload(self) -> Workload:
        if self._readers.keys() != self._sent.keys():
            raise DeadlockError
        for key, (sender, nbytes) in self._sent.items():
            reader, received = self._readers[key]
            self._workload.messages.add(key[0], nbytes, sender, reader)
            self._workload.arriving.append(received)
        return self._workload

    def _add_run(self, run: Run, messages: Messages, group: int) -> None:
        executable = self._plan.executable(run.executable)
        donated = [run.inputs[i] for i in executable.donated]
        growth = self._bytes(run.outputs) - self._bytes(donated)
        temporaries = executable.memory.temporaries if executable.memory else 0
        self._add_operation(run.task, messages, self._duration(group, run.task), growth, temporaries)

    def _add_operation(
        self,
        task: AnyTask | Instant,
        messages: Messages,
        duration: float = 0.0,
        growth: float = 0.0,
        temporaries: float = 0.0,
    ) -> None:
        """Adds an operation that waits for ``messages``, whose values count from then on."""
        received = {key: float(self._bytes(values)) for key, values in messages.items()}
        self._readers |= {key: (len(self._tasks), nbytes) for key, nbytes in received.items()}
        self._tasks.append(task)
        self._workload.durations.append(duration)
        self._workload.at_start.append(growth + temporaries + sum(received.values()))
        self._workload.at_end.append((-temporaries,) if temporaries else ())

    def _bytes(self, values: Iterable[Name]) -> int:
        return sum(self._sizes[name] for name in values)

    def _duration(self, group: int, task: AnyTask) -> float:
        if isinstance(task, OutsideTask):
            return self._costs.outside.get((group, task), 0.0)
        types = types_of(task)
        return sum(self._costs.share(types, [self._alone[member] for member in types]))
