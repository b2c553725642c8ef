"""The values that a group holds from instruction to instruction: bytes on each device, by their purpose."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from mpmd.ir.messages import Messages, first_uses
from mpmd.ir.plan import Free, GroupProgram, MessageKey, Name, Plan, Recv, Run
from mpmd.memory.kinds import KINDS, kinds_of


class HeldMoment(NamedTuple):
    """A moment in a group's program.

    Attributes:
      position: the index of the instruction under way; -1 before the first, and the number of instructions
        at the end.
      run: the run under way, if the instruction is a run.
      taken: the edge and tag of the messages whose values are used from this moment on.
      by_kind: the bytes of values by their purpose, in the order of ``KINDS``, counted as
        ``GroupMemory.live_bytes`` counts them.
      is_after_free: whether the instruction has just dropped values.
    """

    position: int
    run: Run | None
    taken: tuple[MessageKey, ...]
    by_kind: tuple[int, ...]
    is_after_free: bool = False


def held_moments(
    plan: Plan, program: GroupProgram, sizes: Mapping[Name, int], updated: Collection[Name]
) -> Iterator[HeldMoment]:
    """The moments at which a group's values change, from before its first instruction to the program's end.

    Args:
      sizes: the bytes of each value on each device of the group.
      updated: the arguments that the step returns updated.
    """
    numbers = {name: KINDS.index(kind) for name, kind in kinds_of(plan, program, updated).items()}
    held = [0] * len(KINDS)

    def add(names: Iterable[Name], sign: int = 1) -> None:
        for name in names:
            held[numbers[name]] += sign * sizes[name]

    def take(messages: Messages) -> tuple[MessageKey, ...]:
        for values in messages.values():
            add(values)
        return tuple(messages)

    add(plan.resident(program.mpmd_idx))
    yield HeldMoment(-1, None, (), tuple(held))
    *uses, at_end = first_uses(program)
    for position, (instruction, used) in enumerate(zip(program.instructions, uses, strict=True)):
        taken = take(used)
        match instruction:
            case Run(_, executable, inputs, outputs):
                add((inputs[i] for i in plan.executable(executable).donated), -1)
                add(outputs)
                yield HeldMoment(position, instruction, taken, tuple(held))
            case Recv():
                yield HeldMoment(position, None, (), tuple(held))
            case _:
                if taken:
                    yield HeldMoment(position, None, taken, tuple(held))
                if isinstance(instruction, Free):
                    add(instruction.values, -1)
                    yield HeldMoment(position, None, (), tuple(held), is_after_free=True)
    taken = take(at_end)
    yield HeldMoment(len(program.instructions), None, taken, tuple(held))
