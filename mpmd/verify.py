"""Proves of a plan, before it runs, that it can run.

For each group: every value is defined once, before its use, and is what its readers were compiled for; none
is used after its buffer was freed or given away; at the end the step's results are there, and nothing else
but what the caller keeps. For the edges: the receives of an edge are its sends, in the same order, of the
same values, and each message is read. Together: the groups cannot wait for one another for ever.
``docs/verification.md`` says what follows from this, and what is assumed.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpmd.errors import PlanError
from mpmd.holdings import follow
from mpmd.ir import Aval, ConstantLeaf, Executable, InputLeaf, Name, OutputLeaf, Plan, Recv, Run, Send
from mpmd.progress import Edge, channels, meeting_order


@dataclasses.dataclass(frozen=True)
class Verified:
    """What is known of a plan that passed.

    Attributes:
      peak_bytes: for each group, the most bytes of values it holds at once, counting each logical value
        whole; a run's results and those of its inputs that are not donated to them count together, and what
        a message brings counts from where the first of it is used.
      peak_values: for each group, the most values it holds at once, counted in the same way.
      sent_bytes: for each edge, the bytes of one step.
      capacities: for each edge, the most messages of a step that can be under way at once, sent and not yet
        read, whatever the timing.
    """

    peak_bytes: tuple[int, ...]
    peak_values: tuple[int, ...]
    sent_bytes: Mapping[Edge, int]
    capacities: Mapping[Edge, int]


def verify(plan: Plan) -> Verified:
    """Checks a plan, in time proportional to its size.

    Raises ``PlanError`` with every fault in how the plan is put together; if there are none, with every fault
    in what groups hold and send; if there are none, with those for which groups or messages would wait.
    """
    executables = {e.name: e for e in plan.executables}
    _raise([*_check_leaves(plan), *_check_executables(plan), *_check_references(plan, executables)])
    avals, faults = _avals(plan, executables)
    messages = _Messages.of(plan)
    holdings = [follow(plan, program, executables, avals) for program in plan.programs]
    _raise([*faults, *(fault for group in holdings for fault in group.faults), *messages.faults()])
    order = meeting_order(plan)
    _raise(_check_progress(plan, order))
    carried = channels(plan, order)
    _raise([f"edge {a} -> {b}, message {tag}: nothing of it is read" for (a, b), tag in carried.unread])
    return Verified(
        tuple(group.peak_bytes for group in holdings),
        tuple(group.peak_values for group in holdings),
        messages.nbytes(avals),
        carried.capacities,
    )


def _raise(faults: Iterable[str]) -> None:
    if faults := tuple(faults):
        raise PlanError("\n  ".join(["the plan cannot run:", *faults]))


def _check_leaves(plan: Plan) -> Iterator[str]:
    leaves: tuple[InputLeaf | ConstantLeaf | OutputLeaf, ...] = (*_residents(plan), *plan.outputs)
    for leaf in leaves:
        if not set(leaf.mpmd_idxs) <= set(range(len(plan.programs))):
            yield f"{leaf.name} is on groups {leaf.mpmd_idxs}, of which not all exist"
    names = collections.Counter(leaf.name for leaf in _residents(plan) if leaf.name)
    yield from (
        f"{count} inputs or constants are called {name}" for name, count in names.items() if count > 1
    )
    yield from (f"no group has the result {leaf.path}" for leaf in plan.outputs if not leaf.mpmd_idxs)


def _residents(plan: Plan) -> tuple[InputLeaf | ConstantLeaf, ...]:
    return *plan.inputs, *plan.constants


def _check_executables(plan: Plan) -> Iterator[str]:
    names = collections.Counter(e.name for e in plan.executables)
    yield from (f"{count} executables are called {name}" for name, count in names.items() if count > 1)
    for e in plan.executables:
        if (len(e.in_specs), len(e.out_specs)) != (len(e.inputs), len(e.outputs)):
            yield f"{e.name} does not have a spec for each of its inputs and outputs"
        if len(set(e.donated)) < len(e.donated) or not set(e.donated) <= set(range(len(e.inputs))):
            yield f"{e.name} donates {e.donated} of {len(e.inputs)} inputs"
            continue
        takers = collections.Counter(e.outputs)
        takers.subtract(e.inputs[i] for i in e.donated)
        for aval in (aval for aval, count in takers.items() if count < 0):
            yield f"{e.name} donates more inputs of {aval} than it has outputs to take them over"


def _check_references(plan: Plan, executables: Mapping[str, Executable]) -> Iterator[str]:
    """What programs refer to: executables, and one another."""
    groups = range(len(plan.programs))
    for mpmd_idx, program in enumerate(plan.programs):
        if program.mpmd_idx != mpmd_idx:
            yield f"the program at {mpmd_idx} is that of group {program.mpmd_idx}"
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run):
                fault = _misfit(instruction, executables.get(instruction.executable))
            elif isinstance(instruction, (Send, Recv)):
                peer = instruction.dst if isinstance(instruction, Send) else instruction.src
                fault = "" if peer in groups and peer != mpmd_idx else "has no other group at its other end"
            else:
                continue
            if fault:
                yield f"{_at(plan, mpmd_idx, position)} {fault}"


def _misfit(run: Run, executable: Executable | None) -> str:
    if executable is None:
        return f"runs {run.executable}, which does not exist"
    if (len(run.inputs), len(run.outputs)) != (len(executable.inputs), len(executable.outputs)):
        return f"does not have the numbers of inputs and outputs of {run.executable}"
    return ""


def _at(plan: Plan, group: int, position: int) -> str:
    instruction = str(plan.programs[group].instructions[position])[:80]
    return f"group {group}, instruction {position} ({instruction})"


def _avals(plan: Plan, executables: Mapping[str, Executable]) -> tuple[dict[Name, Aval], list[str]]:
    """The shape and dtype of every value, and where a value is said to have others."""
    avals = {leaf.name: leaf.aval for leaf in _residents(plan) if leaf.name}
    faults = []
    for program in plan.programs:
        for instruction in program.instructions:
            if isinstance(instruction, Run):
                outputs = executables[instruction.executable].outputs
                for name, aval in zip(instruction.outputs, outputs, strict=True):
                    if (known := avals.setdefault(name, aval)) != aval:
                        where = f"group {program.mpmd_idx}, {instruction.label}"
                        faults.append(f"{where}: makes {name} as {aval}, which elsewhere is {known}")
    for leaf in plan.outputs:
        if (known := avals.get(leaf.name, leaf.aval)) != leaf.aval:
            faults.append(f"the result {leaf.path} is to be {leaf.aval}, but {leaf.name} is {known}")
    return avals, faults


@dataclasses.dataclass(frozen=True)
class _Messages:
    """What is sent over each edge and what is received, in the order of the programs."""

    sends: Mapping[Edge, list[Send]]
    receives: Mapping[Edge, list[Recv]]

    @staticmethod
    def of(plan: Plan) -> _Messages:
        messages = _Messages(collections.defaultdict(list), collections.defaultdict(list))
        for program in plan.programs:
            for instruction in program.instructions:
                if isinstance(instruction, Send):
                    messages.sends[program.mpmd_idx, instruction.dst].append(instruction)
                elif isinstance(instruction, Recv):
                    messages.receives[instruction.src, program.mpmd_idx].append(instruction)
        return messages

    def faults(self) -> Iterator[str]:
        for edge in sorted({*self.sends, *self.receives}):
            pairs = itertools.zip_longest(self.sends[edge], self.receives[edge])
            for i, (sent, received) in enumerate(pairs):
                if not (sent and received and (sent.tag, sent.values) == (received.tag, received.values)):
                    left, right = sent or "nothing", received or "nothing"
                    yield f"edge {edge[0]} -> {edge[1]}, message {i}: {left}, but {right}"
                    break
            tags = [send.tag for send in self.sends[edge]]
            if any(tag >= after for tag, after in itertools.pairwise(tags)):
                yield f"edge {edge[0]} -> {edge[1]}: tags do not ascend"

    def nbytes(self, avals: Mapping[Name, Aval]) -> dict[Edge, int]:
        """The bytes sent over each edge."""
        return {
            edge: sum(avals[name].nbytes for send in sends for name in send.values)
            for edge, sends in self.sends.items()
            if sends
        }


def _check_progress(plan: Plan, order: Sequence[int]) -> Iterator[str]:
    ran = collections.Counter(order)
    stuck = [p.mpmd_idx for p in plan.programs if ran[p.mpmd_idx] < len(p.instructions)]
    if stuck:
        waits = "; ".join(_at(plan, group, ran[group]) for group in stuck)
        yield f"the groups wait for one another when sends and receives have to meet: {waits}"
