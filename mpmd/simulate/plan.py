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

MessageKey = tuple[Edge, int]
"""The edge and the tag of a message."""


MessageBytes = Callable[[Edge, Name], float]
"""The bytes of a value on the link of an edge."""


def plan_workload(plan: Plan, costs: Costs, sizes: Topology | MessageBytes | None = None) -> Workload:
    """The operations of a plan: its runs.

    A receive only posts: the first reader of one of its values waits for the message, and the end of the step
    waits for the step's results. Memory is the bytes on each device of a group: of the values that it holds,
    counted as ``verify`` counts them, of XLA's temporaries if the groups have compiled, and of the messages
    that have been sent to it. Every step starts with the arguments and constants. A message has the bytes
    that travel between the processes of a topology, those that are said, or those of its whole values.

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

    ``_sent`` has the sender and the size of each message, ``_readers`` the first operation that needs it, and
    ``_received`` the bytes of its values on each device of the receiver. ``_sizes`` has the bytes of values
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
        self._bounds = [0]
        self._tasks: list[AnyTask | Instant] = []
        self._durations: list[float] = []
        self._at_start: list[float] = []
        self._at_end: list[tuple[float, ...]] = []
        self._resident: list[float] = []
        self._sent: dict[MessageKey, tuple[int, float]] = {}
        self._readers: dict[MessageKey, int] = {}
        self._received: dict[MessageKey, int] = {}

    def add(self, program: GroupProgram) -> None:
        """Adds the operations of a group, and the messages that it sends and awaits."""
        group = program.mpmd_idx
        self._sizes = sizes_on_devices(self._plan, group)
        self._resident.append(self._bytes(self._plan.resident(group)))
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
                    self._sent[(group, dst), tag] = (
                        len(self._tasks) - 1,
                        self._sent_bytes((group, dst), values),
                    )
                case Recv(values, src, tag):
                    pending |= dict.fromkeys(values, ((src, group), tag))
                    self._received[(src, group), tag] = self._bytes(values)
                case HostCall(values):
                    self._wait_alone(values, pending)
                case Free(values):
                    self._wait_alone(values, pending)
                    self._at_end[-1] += (-self._bytes(values),)
        self._add_operation(Instant("the end of the step"))
        self._wait([leaf.name for leaf in self._plan.outputs_of(group).values()], pending)
        self._bounds.append(len(self._tasks))

    def workload(self) -> Workload:
        """The workload of all programs. Raises ``ValueError`` for a message that is never sent."""
        messages = MessageTable()
        for (edge, tag), (sender, nbytes) in self._sent.items():
            messages.add(edge, nbytes, sender, self._readers.get((edge, tag), -1))
        never = [
            f"group {dst} waits at {self._tasks[reader]} for message {tag} of group {src}, never sent"
            for ((src, dst), tag), reader in self._readers.items()
            if ((src, dst), tag) not in self._sent
        ]
        if never:
            raise ValueError("\n  - ".join(["the groups get stuck:", *never]))
        return Workload(
            costs=self._costs,
            bounds=self._bounds,
            tasks=self._tasks,
            durations=self._durations,
            at_start=self._at_start,
            at_end=self._at_end,
            resident=self._resident,
            messages=messages,
            arriving=[float(self._received.get(key, 0)) for key in self._sent],
            loops=self._plan.loops,
        )

    def _add_operation(
        self, task: AnyTask | Instant, duration: float = 0.0, growth: float = 0.0, temporaries: float = 0.0
    ) -> None:
        self._tasks.append(task)
        self._durations.append(duration)
        self._at_start.append(growth + temporaries)
        self._at_end.append((-temporaries,) if temporaries else ())

    def _wait(self, values: Iterable[Name], pending: dict[Name, MessageKey]) -> None:
        """Makes the last operation wait for the messages of these values that no operation awaits yet."""
        for name in values:
            if name in pending and (message := pending.pop(name)) not in self._readers:
                self._readers[message] = len(self._tasks) - 1
                self._at_start[-1] += self._received[message]

    def _wait_alone(self, values: Sequence[Name], pending: dict[Name, MessageKey]) -> None:
        """Does the same for an operation of its own, which is no task, if there is a message to wait for."""
        if any(name in pending for name in values):
            self._add_operation(Instant(", ".join(values)))
            self._wait(values, pending)

    def _sent_bytes(self, edge: Edge, values: Sequence[Name]) -> float:
        return sum(self._message_bytes(edge, name) for name in values)

    def _bytes(self, values: Iterable[Name]) -> int:
        return sum(self._sizes[name] for name in values)

    def _duration(self, group: int, task: AnyTask) -> float:
        if isinstance(task, OutsideTask):
            return self._costs.outside.get((group, task), 0.0)
        types = types_of(task)
        return sum(self._costs.share(types, [self._alone[member] for member in types]))
