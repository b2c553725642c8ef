"""The workload of a compiled plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mpmd.ir.plan import (
    AnyTask,
    Cell,
    Edge,
    Free,
    GroupProgram,
    HostCall,
    MessageKey,
    Name,
    OutsideTask,
    Plan,
    Recv,
    Run,
    Send,
)
from mpmd.ir.routes import Routes, Topology
from mpmd.memory import sizes_on_devices
from mpmd.simulate.costs import Costs, types_of
from mpmd.simulate.workload import Instant, MessageTable, Workload

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

    Raises: ``ValueError`` for a kind of task without a time, and for a message that is awaited but never
    sent.
    """
    builder = _WorkloadBuilder(plan, costs, _message_bytes(plan, sizes))
    for program in plan.programs:
        builder.add(program)
    return builder.workload()


def message_keys(plan: Plan) -> tuple[MessageKey, ...]:
    """The edge and the tag of each message of ``plan_workload``, by its number."""
    keys = (
        ((program.mpmd_idx, send.dst), send.tag)
        for program in plan.programs
        for send in program.instructions
        if isinstance(send, Send)
    )
    return tuple(dict.fromkeys(keys))


def _message_bytes(plan: Plan, sizes: Topology | MessageBytes | None) -> MessageBytes:
    if isinstance(sizes, Topology):
        routes = Routes(plan, sizes)
        return lambda edge, name: routes.of_value(edge, name).nbytes
    whole = {name: aval.nbytes for name, aval in plan.avals().items()}
    return sizes or (lambda edge, name: whole[name])


class _WorkloadBuilder:
    """The workload of the programs so far.

    For each message, ``_sent`` has the sender and the size, ``_readers`` the first operation that needs the
    message, and ``_received`` the bytes of its values on each device of the receiver. ``_sizes`` has the
    bytes of values on each device of the group that is added.
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
        self._readers: dict[MessageKey, int] = {}
        self._received: dict[MessageKey, int] = {}

    def add(self, program: GroupProgram) -> None:
        group = program.mpmd_idx
        self._sizes = sizes_on_devices(self._plan, group)
        self._workload.resident.append(self._bytes(self._plan.resident(group)))
        pending: dict[Name, MessageKey] = {}
        self._add_operation(Instant("the arguments"))
        for instruction in program.instructions:
            match instruction:
                case Run(task, name, inputs, outputs):
                    executable = self._plan.executable(name)
                    donated = [inputs[i] for i in executable.donated]
                    growth = self._bytes(outputs) - self._bytes(donated)
                    temporaries = executable.memory.temporaries if executable.memory else 0
                    self._add_operation(task, self._duration(group, task), growth, temporaries)
                    self._wait(inputs, pending)
                case Send(values, dst, tag):
                    self._wait_alone(values, pending)
                    nbytes = sum(self._message_bytes((group, dst), name) for name in values)
                    self._sent[(group, dst), tag] = len(self._tasks) - 1, nbytes
                case Recv(values, src, tag):
                    pending |= dict.fromkeys(values, ((src, group), tag))
                    self._received[(src, group), tag] = self._bytes(values)
                case HostCall(values):
                    self._wait_alone(values, pending)
                case Free(values):
                    self._wait_alone(values, pending)
                    self._workload.at_end[-1] += (-self._bytes(values),)
        self._add_operation(Instant("the end of the step"))
        self._wait([leaf.name for leaf in self._plan.outputs_of(group).values()], pending)
        self._workload.bounds.append(len(self._tasks))

    def workload(self) -> Workload:
        """The workload of all programs. Raises ``ValueError`` for a message that is never sent."""
        for (edge, tag), (sender, nbytes) in self._sent.items():
            self._workload.messages.add(edge, nbytes, sender, self._readers.get((edge, tag), -1))
        never = [
            f"group {dst} waits at {self._tasks[reader]} for message {tag} of group {src}, never sent"
            for ((src, dst), tag), reader in self._readers.items()
            if ((src, dst), tag) not in self._sent
        ]
        if never:
            raise ValueError("\n  - ".join(["the groups get stuck:", *never]))
        self._workload.arriving += [float(self._received.get(key, 0)) for key in self._sent]
        return self._workload

    def _add_operation(
        self, task: AnyTask | Instant, duration: float = 0.0, growth: float = 0.0, temporaries: float = 0.0
    ) -> None:
        self._tasks.append(task)
        self._workload.durations.append(duration)
        self._workload.at_start.append(growth + temporaries)
        self._workload.at_end.append((-temporaries,) if temporaries else ())

    def _wait(self, values: Iterable[Name], pending: dict[Name, MessageKey]) -> None:
        """Records the last operation as the reader of messages with ``values`` that have no reader yet."""
        for name in values:
            if name in pending and (message := pending.pop(name)) not in self._readers:
                self._readers[message] = len(self._tasks) - 1
                self._workload.at_start[-1] += self._received[message]

    def _wait_alone(self, values: Sequence[Name], pending: dict[Name, MessageKey]) -> None:
        """Adds an instant as the reader of messages with ``values``, if any message has no reader yet."""
        if any(name in pending for name in values):
            self._add_operation(Instant(", ".join(values)))
            self._wait(values, pending)

    def _bytes(self, values: Iterable[Name]) -> int:
        return sum(self._sizes[name] for name in values)

    def _duration(self, group: int, task: AnyTask) -> float:
        if isinstance(task, OutsideTask):
            return self._costs.outside.get((group, task), 0.0)
        types = types_of(task)
        return sum(self._costs.share(types, [self._alone[member] for member in types]))
