"""The workload of a compiled plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpmd.ir import Free, GroupProgram, Name, Plan, Recv, Run, Send
from mpmd.simulate.costs import Costs, cell_of, types_of
from mpmd.simulate.workload import Messages, Workload

MessageId = tuple[int, int, int]
"""A message by its source, destination and tag."""


def of_plan(plan: Plan, costs: Costs) -> Workload:
    """The operations of a plan: its runs.

    A receive only posts: what first reads one of its values waits for it, and the end of the step waits for
    the step's results. Memory is the bytes of the values that a group holds, counted as ``verify`` counts
    them; every step starts with the arguments and constants.

    Raises: ``ValueError`` for a kind of task without a time, and for what waits for a message never sent.
    """
    reader = _Reader(plan, costs)
    for program in plan.programs:
        reader.read(program)
    return reader.workload()


class _Reader:
    def __init__(self, plan: Plan, costs: Costs):
        self._plan = plan
        self._costs = costs
        self._sizes = {name: aval.nbytes for name, aval in plan.avals().items()}
        self._donated = {executable.name: executable.donated for executable in plan.executables}
        runs = (i for program in plan.programs for i in program.instructions if isinstance(i, Run))
        cells = [cell for run in runs if (cell := cell_of(run.label))]
        self._alone = costs.times({member for cell in cells for member in types_of(cell)})
        self._bounds = [0]
        self._labels: list[str] = []
        self._durations: list[float] = []
        self._at_start: list[float] = []
        self._at_end: list[tuple[float, ...]] = []
        self._hidden: set[int] = set()
        self._sent: dict[MessageId, tuple[int, float]] = {}
        self._readers: dict[MessageId, int] = {}
        self._received: dict[MessageId, int] = {}

    def read(self, program: GroupProgram) -> None:
        """Adds the operations of a group."""
        group = program.mpmd_idx
        pending: dict[Name, MessageId] = {}
        self._add_hidden("the arguments")
        for instruction in program.instructions:
            match instruction:
                case Run(label, executable, inputs, outputs):
                    taken = [inputs[i] for i in self._donated[executable]]
                    growth = self._bytes(outputs) - self._bytes(taken)
                    self._add(label, self._duration(group, label), growth)
                    self._wait(inputs, pending)
                case Send(values, dst, tag):
                    self._wait_alone(values, pending)
                    self._sent[group, dst, tag] = len(self._labels) - 1, self._bytes(values)
                case Recv(values, src, tag):
                    pending |= dict.fromkeys(values, (src, group, tag))
                    self._received[src, group, tag] = self._bytes(values)
                case Free(values):
                    self._wait_alone(values, pending)
                    self._at_end[-1] += (-self._bytes(values),)
        self._add_hidden("the end of the step")
        self._wait([leaf.name for leaf in self._plan.outputs if group in leaf.mpmd_idxs], pending)
        self._bounds.append(len(self._labels))

    def workload(self) -> Workload:
        """What was read."""
        messages = Messages()
        for (src, dst, tag), (sender, nbytes) in self._sent.items():
            messages.add((src, dst), nbytes, sender, self._readers.get((src, dst, tag), -1))
        never = [
            f"group {dst} waits at {self._labels[reader]} for message {tag} of group {src}, never sent"
            for (src, dst, tag), reader in self._readers.items()
            if (src, dst, tag) not in self._sent
        ]
        if never:
            raise ValueError("\n  - ".join(["the groups get stuck:", *never]))
        resident: list[float] = [self._bytes(self._plan.resident(p.mpmd_idx)) for p in self._plan.programs]
        return Workload(
            self._costs,
            self._bounds,
            self._labels,
            self._durations,
            self._at_start,
            self._at_end,
            resident,
            messages,
            frozenset(self._hidden),
        )

    def _add(self, label: str, duration: float, growth: float) -> None:
        self._labels.append(label)
        self._durations.append(duration)
        self._at_start.append(growth)
        self._at_end.append(())

    def _add_hidden(self, label: str) -> None:
        """Adds what is no task, but waits or sends where no task does."""
        self._hidden.add(len(self._labels))
        self._add(label, 0.0, 0.0)

    def _wait(self, values: Iterable[Name], pending: dict[Name, MessageId]) -> None:
        """Has the last operation wait for the messages that bring these values, unless others did before."""
        for name in values:
            if name in pending and (message := pending.pop(name)) not in self._readers:
                self._readers[message] = len(self._labels) - 1
                self._at_start[-1] += self._received[message]

    def _wait_alone(self, values: Sequence[Name], pending: dict[Name, MessageId]) -> None:
        """The same in an operation of its own, if there is anything to wait for."""
        if any(name in pending for name in values):
            self._add_hidden(", ".join(values))
            self._wait(values, pending)

    def _bytes(self, values: Iterable[Name]) -> int:
        return sum(self._sizes[name] for name in values)

    def _duration(self, group: int, label: str) -> float:
        if cell := cell_of(label):
            types = types_of(cell)
            return sum(self._costs.share(types, [self._alone[member] for member in types]))
        return self._costs.outside.get((group, label), 0.0)
