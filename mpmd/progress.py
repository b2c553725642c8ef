"""Shows that the programs of a plan end, and how many messages its channels have to hold.

Both follow from orders of instructions. In the *meeting order* a send and its receive take place at the same
moment; if there is one for the whole plan, no way of carrying messages can make the groups wait for one
another for ever. The *past* of an instruction is what has to have run before it, whatever the timing: what
precedes it in its program, and, where it is the first to read a message, the message's send with its past.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpmd.ir import Instruction, Name, Plan, Recv, Run, Send

Edge = tuple[int, int]
"""Source and destination group."""


def meeting_order(plan: Plan) -> list[int]:
    """An order of all instructions in which each send comes right before its receive, as far as there is one.

    For a plan in which the receives of each edge are its sends, in the same order. The order is given by the
    groups: where a group stands for the nth time, it runs its nth instruction.
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
                if not _meet(group, instruction, programs[peer][ran[peer]]):
                    break
                order += (group, peer) if isinstance(instruction, Send) else (peer, group)
                ran[peer] += 1
                ready.append(peer)
            else:
                order.append(group)
            ran[group] += 1
    return order


def _meet(group: int, instruction: Send | Recv, other: Instruction | None) -> bool:
    """Whether the peer that ``group`` sends to is at its receive, or the one it receives from at its send."""
    if isinstance(instruction, Send):
        return isinstance(other, Recv) and other.src == group
    return isinstance(other, Send) and other.dst == group


@dataclasses.dataclass(frozen=True)
class Channels:
    """What the channels of a plan carry.

    Attributes:
      capacities: for each edge, the most messages that can be under way at once, sent and not yet read.
      unread: the messages, by edge and tag, of which no value is read; they would never leave the channel.
    """

    capacities: Mapping[Edge, int]
    unread: tuple[tuple[Edge, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Message:
    edge: Edge
    tag: int
    past: np.ndarray
    """For each group, how many of its instructions are the send or in its past."""


def channels(plan: Plan, order: Sequence[int]) -> Channels:
    """Derives what the channels carry from the pasts of all sends.

    When a message is sent, most are under way if the receiver has run no more than the send's past; it has
    then read those messages whose first reader is in that past. Takes time proportional to the instructions,
    and to the messages times the groups.

    Args:
      order: the meeting order of all its instructions.
    """
    ran = [0] * len(plan.programs)
    past = [np.zeros(len(plan.programs), int) for _ in plan.programs]
    posted: list[dict[Name, _Message]] = [{} for _ in plan.programs]
    unread: dict[_Message, None] = {}
    sent: collections.Counter[Edge] = collections.Counter()
    read_at: dict[Edge, list[int]] = collections.defaultdict(list)
    capacities: dict[Edge, int] = {}

    def read(group: int, position: int, names: Iterable[Name]) -> None:
        for name in names:
            message = posted[group].pop(name, None)
            if message in unread:
                del unread[message]
                past[group] = np.maximum(past[group], message.past)
                read_at[message.edge].append(position)

    for group in order:
        position = ran[group]
        ran[group] += 1
        instruction = plan.programs[group].instructions[position]
        if isinstance(instruction, Run):
            read(group, position, instruction.inputs)
        elif isinstance(instruction, Send):
            read(group, position, instruction.values)
            edge = (group, instruction.dst)
            known = past[group].copy()
            known[group] = position + 1
            message = _Message(edge, instruction.tag, known)
            unread[message] = None
            sent[edge] += 1
            under_way = sent[edge] - bisect.bisect_left(read_at[edge], int(known[instruction.dst]))
            capacities[edge] = max(capacities.get(edge, 0), under_way)
        elif isinstance(instruction, Recv):
            posted[group].update(dict.fromkeys(instruction.values, message))  # sent right before
    for group, program in enumerate(plan.programs):
        results = [leaf.name for leaf in plan.outputs if group in leaf.mpmd_idxs]
        read(group, len(program.instructions), results)
    return Channels(capacities, tuple((message.edge, message.tag) for message in unread))
