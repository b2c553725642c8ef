"""Proves of a plan, before it runs, that it can run.

For each group: every value is defined once, before its use, and not used after it was freed or donated;
the step's results are there at the end. For the edges: the receives of an edge are its sends, in the same
order, of the same values. Together: the groups cannot wait for one another for ever, even when a send
waits for its receive to be posted and a receive for its message to arrive.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from mpmd.errors import PlanError
from mpmd.ir import ConstantLeaf, Free, GroupProgram, InputLeaf, Name, Plan, Recv, Run, Send

Edge = tuple[int, int]
"""Source and destination group."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """What is known of a plan that passed.

    Attributes:
      peak_bytes: for each group, the most bytes of values it holds at once, counting each logical value
        whole; a run's results and those of its inputs that are not donated to them count together.
      sent_bytes: for each edge, the bytes of one step.
      capacities: for each edge, the most messages that are on their way at once if every group receives as
        late and sends as early as its program and its data allow.
    """

    peak_bytes: tuple[int, ...]
    sent_bytes: Mapping[Edge, int]
    capacities: Mapping[Edge, int]


def verify(plan: Plan) -> Verified:
    """Checks a plan. Raises ``PlanError`` with every fault found."""
    faults = [fault for program in plan.programs for fault in _check_values(plan, program)]
    faults += _check_edges(plan)
    if not faults:
        faults += _check_progress(plan)
    if faults:
        raise PlanError("the plan cannot run:\n  " + "\n  ".join(faults))
    sizes = _sizes(plan)
    sent: collections.Counter[Edge] = collections.Counter()
    for program in plan.programs:
        for i in program.instructions:
            if isinstance(i, Send):
                sent[program.mpmd_idx, i.dst] += sum(sizes[name] for name in i.values)
    peaks = tuple(_peak_bytes(plan, program, sizes) for program in plan.programs)
    return Verified(peaks, dict(sent), _capacities(plan))


def _check_values(plan: Plan, program: GroupProgram) -> Iterator[str]:
    executables = {e.name: e for e in plan.executables}
    alive = set(plan.resident(program.mpmd_idx))
    gone: dict[Name, str] = {}
    kept = {leaf.name for leaf in plan.inputs if leaf.name and not leaf.donated}
    kept |= {leaf.name for leaf in plan.constants}

    def where() -> str:
        return f"group {program.mpmd_idx}, instruction {position} ({_short(instruction)})"

    def faults_of_reading(names) -> list[str]:
        lacking = [name for name in names if name not in alive]
        return [f"{where()} uses {name}, which {gone.get(name, 'is never defined')}" for name in lacking]

    def faults_of_defining(names) -> list[str]:
        known = [name for name in names if name in alive or name in gone]
        alive.update(names)
        return [f"{where()} defines {name} again" for name in known]

    for position, instruction in enumerate(program.instructions):
        match instruction:
            case Run(_, name, inputs, outputs):
                yield from faults_of_reading(inputs)
                executable = executables.get(name)
                if executable is None:
                    yield f"{where()} runs {name}, which does not exist"
                    continue
                if (len(executable.inputs), len(executable.outputs)) != (len(inputs), len(outputs)):
                    yield f"{where()} does not have the numbers of inputs and outputs of {name}"
                    continue
                for i in executable.donated:
                    if inputs[i] in kept:
                        yield f"{where()} donates {inputs[i]}, which the caller keeps"
                    if inputs.count(inputs[i]) > 1:
                        yield f"{where()} donates {inputs[i]} and reads it as another input too"
                    alive.discard(inputs[i])
                    gone[inputs[i]] = f"was donated in instruction {position}"
                yield from faults_of_defining(outputs)
            case Send(values):
                yield from faults_of_reading(values)
            case Recv(values):
                yield from faults_of_defining(values)
            case Free(values):
                yield from faults_of_reading(values)
                alive.difference_update(values)
                gone.update(dict.fromkeys(values, f"was freed in instruction {position}"))
    for leaf in plan.outputs:
        if program.mpmd_idx in leaf.mpmd_idxs and leaf.name not in alive:
            yield (
                f"group {program.mpmd_idx} lacks the result {leaf.path} ({leaf.name}), which "
                f"{gone.get(leaf.name, 'is never defined')}"
            )


def _short(instruction: Run | Send | Recv | Free) -> str:
    return instruction.label if isinstance(instruction, Run) else str(instruction).split(" = ")[-1][:60]


def _check_edges(plan: Plan) -> Iterator[str]:
    sends: dict[Edge, list] = collections.defaultdict(list)
    receives: dict[Edge, list] = collections.defaultdict(list)
    for program in plan.programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                message = (instruction.tag, instruction.values)
                sends[program.mpmd_idx, instruction.dst].append(message)
            elif isinstance(instruction, Recv):
                message = (instruction.tag, instruction.values)
                receives[instruction.src, program.mpmd_idx].append(message)
    for edge in sorted({*sends, *receives}):
        sent, received = sends[edge], receives[edge]
        if not 0 <= edge[1] < len(plan.programs) or edge[0] == edge[1]:
            yield f"edge {edge[0]} -> {edge[1]} leads to no other group"
        for i in range(max(len(sent), len(received))):
            left = sent[i] if i < len(sent) else "nothing"
            right = received[i] if i < len(received) else "nothing"
            if left != right:
                yield f"edge {edge[0]} -> {edge[1]}, message {i}: sends {left}, receives {right}"
                break
        tags = [tag for tag, _ in sent]
        if tags != sorted(set(tags)):
            yield f"edge {edge[0]} -> {edge[1]}: tags do not ascend"


def _check_progress(plan: Plan) -> Iterator[str]:
    """Runs the programs with sends and receives that have to meet, and reports a circle of waits."""
    positions = [0] * len(plan.programs)

    def current(group: int):
        instructions = plan.programs[group].instructions
        return instructions[positions[group]] if positions[group] < len(instructions) else None

    ready = list(range(len(plan.programs)))
    while ready:
        group = ready.pop()
        while (instruction := current(group)) is not None:
            if isinstance(instruction, (Send, Recv)):
                peer = instruction.dst if isinstance(instruction, Send) else instruction.src
                other = current(peer)
                if not _meet(group, instruction, peer, other):
                    break
                positions[peer] += 1
                ready.append(peer)
            positions[group] += 1
    stuck = [group for group in range(len(plan.programs)) if current(group) is not None]
    if stuck:
        waits = "; ".join(f"group {group} at {str(current(group))[:80]}" for group in stuck)
        yield f"the groups wait for one another when sends and receives have to meet: {waits}"


def _meet(group: int, instruction: Send | Recv, peer: int, other) -> bool:
    if isinstance(instruction, Send):
        return isinstance(other, Recv) and (other.src, other.tag) == (group, instruction.tag)
    return isinstance(other, Send) and (other.dst, other.tag) == (group, instruction.tag)


def _sizes(plan: Plan) -> dict[Name, int]:
    """The bytes of every value."""
    leaves: tuple[InputLeaf | ConstantLeaf, ...] = (*plan.inputs, *plan.constants)
    sizes = {leaf.name: leaf.aval.nbytes for leaf in leaves if leaf.name}
    made = {e.name: [aval.nbytes for aval in e.outputs] for e in plan.executables}
    for program in plan.programs:
        for i in program.instructions:
            if isinstance(i, Run):
                sizes.update(zip(i.outputs, made[i.executable], strict=True))
    return sizes


def _peak_bytes(plan: Plan, program: GroupProgram, sizes: Mapping[Name, int]) -> int:
    executables = {e.name: e for e in plan.executables}

    def bytes_of(names: Iterable[Name]) -> int:
        return sum(map(sizes.__getitem__, names))

    live = peak = bytes_of(plan.resident(program.mpmd_idx))
    for instruction in program.instructions:
        match instruction:
            case Run(_, name, inputs, outputs):
                live += bytes_of(outputs) - bytes_of([inputs[i] for i in executables[name].donated])
            case Recv(values):
                live += bytes_of(values)
            case Free(values):
                live -= bytes_of(values)
        peak = max(peak, live)
    return peak


def _capacities(plan: Plan) -> dict[Edge, int]:
    """Runs the programs with senders as far ahead as data allows and receivers that take what they use."""
    positions = [0] * len(plan.programs)
    in_flight: collections.Counter[Edge] = collections.Counter()
    sent: set[tuple[int, int, int]] = set()
    most: dict[Edge, int] = {}
    posted: list[dict[Name, tuple[int, int, int]]] = [{} for _ in plan.programs]
    moved = True
    while moved:
        moved = False
        for group, program in enumerate(plan.programs):
            while positions[group] < len(program.instructions):
                instruction = program.instructions[positions[group]]
                match instruction:
                    case Recv(values, src, tag):
                        posted[group].update(dict.fromkeys(values, (src, group, tag)))
                    case Run(inputs=values) | Send(values):
                        waits = {posted[group][name] for name in values if name in posted[group]}
                        if not waits <= sent:
                            break
                        for src, _, _ in waits:
                            in_flight[src, group] -= 1
                        if waits:
                            posted[group] = {n: k for n, k in posted[group].items() if k not in waits}
                        if isinstance(instruction, Send):
                            edge = (group, instruction.dst)
                            in_flight[edge] += 1
                            most[edge] = max(most.get(edge, 0), in_flight[edge])
                            sent.add((*edge, instruction.tag))
                positions[group] += 1
                moved = True
    return most
