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
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mpmd.ir.messages import first_uses, sends_of
from mpmd.ir.plan import Edge, HostCall, Instruction, MessageKey, Plan, Recv, Run, Send
from mpmd.memory import EarliestArrival
from mpmd.util.grouping import grouped
from mpmd.verify.structure import describe


def check_messages(plan: Plan) -> Iterator[str]:
    sends = grouped(sends_of(plan))
    receives = grouped(
        ((recv.src, program.mpmd_idx), recv)
        for program in plan.programs
        for recv in program.instructions
        if isinstance(recv, Recv)
    )
    for edge in sorted({*sends, *receives}):
        both = itertools.zip_longest(sends.get(edge, ()), receives.get(edge, ()))
        for i, (sent, received) in enumerate(both):
            if not (sent and received and (sent.tag, sent.values) == (received.tag, received.values)):
                left, right = sent or "nothing", received or "nothing"
                yield f"edge {edge[0]} -> {edge[1]}, message {i}: {left}, but {right}"
                break
        if any(send.tag >= after.tag for send, after in itertools.pairwise(sends.get(edge, ()))):
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


def check_reads(plan: Plan) -> Iterator[str]:
    for program in plan.programs:
        read = {leaf.name for leaf in plan.outputs_of(program.mpmd_idx).values()}
        for instruction in program.instructions:
            if isinstance(instruction, Run):
                read.update(instruction.inputs)
            elif isinstance(instruction, (Send, HostCall)):
                read.update(instruction.values)
        for recv in program.instructions:
            if isinstance(recv, Recv) and read.isdisjoint(recv.values):
                yield f"edge {recv.src} -> {program.mpmd_idx}, message {recv.tag}: nothing of it is read"


@dataclasses.dataclass(frozen=True)
class Channels:
    """The messages of the channels of a plan.

    Attributes:
      capacities: for each edge, the most messages that can be in flight at once, sent and not yet used.
      arrivals: when each message can be there at the earliest, by edge and tag.
    """

    capacities: Mapping[Edge, int]
    arrivals: Mapping[MessageKey, EarliestArrival]


def channels_of(plan: Plan, order: Sequence[int]) -> Channels:
    """Derives the messages of the channels, with vector clocks.

    The vector clock of a send has, for each group, how many of its instructions are the send or in the causal
    past of the send. When a message is sent, the most messages are in flight if the receiver has run no more
    than the causal past of the send; it has then taken in those messages whose first use is in that past.
    This takes time proportional to the instructions, and to the messages times the groups.

    Args:
      order: the rendezvous order of all instructions.
    """
    ran = [0] * len(plan.programs)
    clocks = [np.zeros(len(plan.programs), int) for _ in plan.programs]
    uses = list(map(first_uses, plan.programs))
    sends: dict[MessageKey, np.ndarray] = {}
    sent: collections.Counter[Edge] = collections.Counter()
    used_at: dict[Edge, list[int]] = collections.defaultdict(list)
    capacities: dict[Edge, int] = {}
    for group in order:
        position = ran[group]
        ran[group] += 1
        for edge, tag in uses[group][position]:
            clocks[group] = np.maximum(clocks[group], sends[edge, tag])
            used_at[edge].append(position)
        instruction = plan.programs[group].instructions[position]
        if isinstance(instruction, Send):
            edge = (group, instruction.dst)
            clock = clocks[group].copy()
            clock[group] = position + 1
            sends[edge, instruction.tag] = clock
            sent[edge] += 1
            in_flight = sent[edge] - bisect.bisect_left(used_at[edge], int(clock[instruction.dst]))
            capacities[edge] = max(capacities.get(edge, 0), in_flight)
    for group, of_group in enumerate(uses):
        for key in of_group[-1]:
            clocks[group] = np.maximum(clocks[group], sends[key])
    arrivals = {key: _arrival(key[0][1], clock, clocks) for key, clock in sends.items()}
    return Channels(capacities, arrivals)


def _arrival(receiver: int, send: np.ndarray, ends: Sequence[np.ndarray]) -> EarliestArrival:
    """The earliest arrival of a message, by the vector clocks of its send and of the ends of all programs."""
    if position := int(send[receiver]):
        return EarliestArrival(position, None)
    # What precedes the send begins after the step before has ended on the groups that take part in it.
    before = (ends[group][receiver] for group in np.flatnonzero(send).tolist())
    return EarliestArrival(0, int(max(before)))
