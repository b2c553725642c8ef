"""The messages of a plan: what groups send, and when they take messages in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpmd.ir.plan import Edge, GroupProgram, MessageKey, Name, Plan, Recv, Run, Send

Messages = Mapping[MessageKey, tuple[Name, ...]]
"""The values of messages, by edge and tag."""


def sends_of(plan: Plan) -> Iterator[tuple[Edge, Send]]:
    for program in plan.programs:
        for send in program.instructions:
            if isinstance(send, Send):
                yield (program.mpmd_idx, send.dst), send


def first_uses(program: GroupProgram) -> list[Messages]:
    """For each instruction, the messages of which it is the first to use a value.

    A receive only posts; the first use of one of its values waits for the message. A last entry has the
    messages that no instruction uses: in a correct plan, their values are results.
    """
    posted: dict[Name, MessageKey] = {}
    unused: dict[MessageKey, tuple[Name, ...]] = {}
    uses: list[Messages] = []
    for instruction in program.instructions:
        names = instruction.inputs if isinstance(instruction, Run) else instruction.values
        keys = dict.fromkeys(posted[name] for name in names if posted.get(name) in unused)
        uses.append({key: unused.pop(key) for key in keys})
        if isinstance(instruction, Recv):
            key = (instruction.src, program.mpmd_idx), instruction.tag
            posted |= dict.fromkeys(names, key)
            unused[key] = names
    return [*uses, unused]
