"""Follows the messages of a plan: whether they match, whether groups deadlock, how many are in flight.

In the *rendezvous order* a send and its receive take place at the same moment. If all instructions of the
plan have such an order, no way of carrying messages can make the groups deadlock. The *causal past* of an
instruction are the instructions that run before it, whatever the timing: the earlier instructions of its
program and, for each message that the program has read by then, the send with the causal past of the send.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from mpmd.ir.plan import Edge, HostCall, Instruction, Name, Plan, Recv, Run, Send
from mpmd.memory import EarliestArrival
from mpmd.verify.structure import describe


def check_messages(plan: Plan) -> Iterator[str]:
    sends: dict[Edge, list[Send]] = collections.defaultdict(list)
    receives: dict[Edge, list[Recv]] = collections.defaultdict(list)
    for program in plan.programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                sends[program.mpmd_idx, instruction.dst].append(instruction)
            elif isinstance(instruction, Recv):
                receives[instruction.src, program.mpmd_idx].append(instruction)
    for edge in sorted({*sends, *receives}):
        for i, (sent, received) in enumerate(itertools.zip_longest(sends[edge], receives[edge])):
            if not (sent and received and (sent.tag, sent.values) == (received.tag, received.values)):
                left, right = sent or "nothing", received or "nothing"
                yield f"edge {edge[0]} -> {edge[1]}, message {i}: {left}, but {right}"
                break
        if any(send.tag >= after.tag for send, after in itertools.pairwise(sends[edge])):
            yield f"edge {edge[0]} -> {edge[1]}: tags do not ascend"


def rendezvous_order(plan: Plan) -> list[int]:
    """An order of all instructions in which each send comes right before its receive.

    The order covers as many instructions as can run that way; ``check_deadlock`` says which are left. It is
    given by groups: where a group occurs for the nth time, it runs its nth instruction. The receives of each
    edge have to be its sends, in the same order.
    """
    programs = [(*program.instructions, None) for program in plan.programs]
    ran = [0] * len(programs)
    order: list[int] = []
    ready = list(range(len(programs)))
    while ready:
        group = ready.pop()
        while (instruction := programs[group][ran[group]]) is not None:
            if isinstance(instruction, (Send, Recv)):
                peer = instruction.dst if isinstance(instruction, Send) else instruction.src
                if not _is_counterpart(group, instruction, programs[peer][ran[peer]]):
                    break
                order += (group, peer) if isinstance(instruction, Send) else (peer, group)
                ran[peer] += 1
                ready.append(peer)
            else:
                order.append(group)
            ran[group] += 1
    return order


def _is_counterpart(group: int, instruction: Send | Recv, other: Instruction | None) -> bool:
    if isinstance(instruction, Send):
        return isinstance(other, Recv) and other.src == group
    return isinstance(other, Send) and other.dst == group


def check_deadlock(plan: Plan, order: Sequence[int]) -> Iterator[str]:
    ran = collections.Counter(order)
    stuck = [p.mpmd_idx for p in plan.programs if ran[p.mpmd_idx] < len(p.instructions)]
    if stuck:
        waits = "; ".join(describe(plan, group, ran[group]) for group in stuck)
        yield f"the groups wait for one another when sends and receives have to meet: {waits}"


@dataclasses.dataclass(frozen=True)
class Channels:
    """The messages of the channels of a plan.

    Attributes:
      capacities: for each edge, the most messages that can be in flight at once, sent and not yet read.
      unread: the messages, by edge and tag, of which no value is read; they would never leave the channel.
      arrivals: when each message can be there at the earliest, by edge and tag.
    """

    capacities: Mapping[Edge, int]
    unread: tuple[tuple[Edge, int], ...]
    arrivals: Mapping[tuple[Edge, int], EarliestArrival]


@dataclasses.dataclass(frozen=True, eq=False)
class _SentMessage:
    """A message that is in flight.

    Attributes:
      clock: the vector clock of the send: for each group, how many of its instructions are the send or in the
        causal past of the send.
    """

    edge: Edge
    tag: int
    clock: np.ndarray


def channels_of(plan: Plan, order: Sequence[int]) -> Channels:
    """Derives the messages of the channels, with vector clocks.

    When a message is sent, the most messages are in flight if the receiver has run no more than the causal
    past of the send; it has then read those messages whose first reader is in that past. This takes time
    proportional to the instructions, and to the messages times the groups.

    Args:
      order: the rendezvous order of all instructions.
    """
    ran = [0] * len(plan.programs)
    clocks = [np.zeros(len(plan.programs), int) for _ in plan.programs]
    posted: list[dict[Name, _SentMessage]] = [{} for _ in plan.programs]
    unread: dict[_SentMessage, None] = {}
    messages: list[_SentMessage] = []
    sent: collections.Counter[Edge] = collections.Counter()
    read_at: dict[Edge, list[int]] = collections.defaultdict(list)
    capacities: dict[Edge, int] = {}

    def read(group: int, position: int, names: Iterable[Name]) -> None:
        for name in names:
            message = posted[group].pop(name, None)
            if message in unread:
                del unread[message]
                clocks[group] = np.maximum(clocks[group], message.clock)
                read_at[message.edge].append(position)

    for group in order:
        position = ran[group]
        ran[group] += 1
        instruction = plan.programs[group].instructions[position]
        if isinstance(instruction, Run):
            read(group, position, instruction.inputs)
        elif isinstance(instruction, HostCall):
            read(group, position, instruction.values)
        elif isinstance(instruction, Send):
            read(group, position, instruction.values)
            edge = (group, instruction.dst)
            clock = clocks[group].copy()
            clock[group] = position + 1
            message = _SentMessage(edge, instruction.tag, clock)
            unread[message] = None
            messages.append(message)
            sent[edge] += 1
            in_flight = sent[edge] - bisect.bisect_left(read_at[edge], int(clock[instruction.dst]))
            capacities[edge] = max(capacities.get(edge, 0), in_flight)
        elif isinstance(instruction, Recv):
            posted[group].update(dict.fromkeys(instruction.values, message))  # sent right before
    for group, program in enumerate(plan.programs):
        results = [leaf.name for leaf in plan.outputs_of(group).values()]
        read(group, len(program.instructions), results)
    return Channels(
        capacities=capacities,
        unread=tuple((message.edge, message.tag) for message in unread),
        arrivals={(message.edge, message.tag): _arrival(message, clocks) for message in messages},
    )


def _arrival(message: _SentMessage, clocks: Sequence[np.ndarray]) -> EarliestArrival:
    """The earliest arrival of a message, given the vector clocks of the ends of the groups' programs."""
    receiver = message.edge[1]
    position = int(message.clock[receiver])
    if position:
        return EarliestArrival(position, None)
    # What precedes the send begins after the step before has ended on the groups that take part in it.
    before = (clocks[group][receiver] for group in np.flatnonzero(message.clock).tolist())
    return EarliestArrival(0, int(max(before)))
