"""The values that a group holds from instruction to instruction: bytes on each device, by their purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.ir.plan import Free, GroupProgram, MessageKey, Name, Plan, Recv, Run
from mpmd.memory.kinds import KINDS, Kind


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
    plan: Plan, program: GroupProgram, sizes: Mapping[Name, int], kinds: Mapping[Name, Kind]
) -> Iterator[HeldMoment]:
    """The moments at which a group's values change, from before its first instruction to the program's end.

    Args:
      sizes: the bytes of each value on each device of the group.
      kinds: the purpose of each value of the group.
    """
    held = _GroupValues(program.mpmd_idx, sizes, kinds)
    held.add(tuple(plan.resident(program.mpmd_idx)))
    yield HeldMoment(-1, None, (), held.by_kind)
    for position, instruction in enumerate(program.instructions):
        match instruction:
            case Run(_, executable, inputs, outputs):
                taken = held.take(inputs)
                held.drop([inputs[i] for i in plan.executable(executable).donated])
                held.add(outputs)
                yield HeldMoment(position, instruction, taken, held.by_kind)
            case Recv(values):
                held.arriving |= dict.fromkeys(values, instruction)
                yield HeldMoment(position, None, (), held.by_kind)
            case _:
                if taken := held.take(instruction.values):
                    yield HeldMoment(position, None, taken, held.by_kind)
                if isinstance(instruction, Free):
                    held.drop(instruction.values)
                    yield HeldMoment(position, None, (), held.by_kind, is_after_free=True)
    taken = held.take(tuple(held.arriving))
    yield HeldMoment(len(program.instructions), None, taken, held.by_kind)


class _GroupValues:
    def __init__(self, mpmd_idx: int, sizes: Mapping[Name, int], kinds: Mapping[Name, Kind]):
        self._mpmd_idx = mpmd_idx
        self._sizes = sizes
        self._numbers = {name: KINDS.index(kind) for name, kind in kinds.items()}
        self._bytes = [0] * len(KINDS)
        self.arriving: dict[Name, Recv] = {}

    @property
    def by_kind(self) -> tuple[int, ...]:
        return tuple(self._bytes)

    def add(self, names: Sequence[Name]) -> None:
        for name in names:
            self._bytes[self._numbers[name]] += self._sizes[name]

    def drop(self, names: Sequence[Name]) -> None:
        for name in names:
            self._bytes[self._numbers[name]] -= self._sizes[name]

    def take(self, names: Sequence[Name]) -> tuple[MessageKey, ...]:
        """Begins to use the messages that bring these values; returns the edge and tag of each message."""
        taken = []
        for name in names:
            if (recv := self.arriving.get(name)) is not None:
                for value in recv.values:
                    del self.arriving[value]
                self.add(recv.values)
                taken.append(((recv.src, self._mpmd_idx), recv.tag))
        return tuple(taken)
