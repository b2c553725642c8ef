"""What a plan computes, found by running it with terms for arrays; independent of how plans are verified."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from mpmd.ir.plan import Edge, Free, HostCall, Name, Plan, Recv, Run, Send


@dataclasses.dataclass(eq=False)
class Buffer:
    """A device buffer; its ``term`` is ``None`` once another value has taken it over."""

    term: int | None

    def read(self) -> int:
        assert self.term is not None, "a buffer is read that was given away"
        return self.term


@dataclasses.dataclass
class Meaning:
    """The term of each result on each group; how often each term is computed, and each callback called."""

    results: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    computed: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    callbacks: collections.Counter[tuple] = dataclasses.field(default_factory=collections.Counter)


_terms: dict[tuple, int] = {}


def _term(*parts) -> int:
    """A number for what is computed of these parts: equal parts, equal numbers."""
    return _terms.setdefault(parts, len(_terms))


def meaning(plan: Plan, order: Sequence[int]) -> Meaning:
    """Runs all groups, always the first in ``order`` that can go on.

    A message shares its sender's buffers until it is read, as in some transports. Asserts that nothing is
    read that is not there, that no group is stuck, and that each has its results and what the caller keeps in
    the end, and nothing else.
    """
    found = Meaning()
    channels: dict[tuple[Edge, int], list[Buffer]] = {}
    running = {group: _run(plan, group, channels, found) for group in order}
    while running:
        for group, going in list(running.items()):
            waits = next(going, None)
            if waits is None:
                del running[group]
            if not waits:
                break
        else:
            raise AssertionError(f"groups {list(running)} wait for one another")
    assert not channels, "messages are left in their channels"
    return found


def _run(plan: Plan, group: int, channels: dict, found: Meaning) -> Iterator[bool]:
    """Runs one group; says after each instruction ``False``, and ``True`` for as long as it waits."""
    held: dict[Name, Buffer | tuple] = {n: Buffer(_term("given", n)) for n in plan.resident(group)}

    def wait(name: Name) -> Iterator[bool]:
        assert name in held, f"{name} is not there"
        message = held[name]
        if isinstance(message, tuple):
            while message not in channels:
                yield True
            names, buffers = zip(*channels.pop(message), strict=True)
            for other, buffer in zip(names, buffers, strict=True):
                if held.get(other) == message:
                    held[other] = Buffer(buffer.read())

    for i in plan.programs[group].instructions:
        match i:
            case Run():
                for name in i.inputs:
                    yield from wait(name)
                inputs = [held[name].read() for name in i.inputs]
                found.computed[_term(i.executable, *inputs)] += 1
                for name in (i.inputs[position] for position in plan.executable(i.executable).donated):
                    held.pop(name).term = None
                for number, name in enumerate(i.outputs):
                    assert name not in held, f"{name} is there already"
                    held[name] = Buffer(_term(i.executable, *inputs, "output", number))
            case Send():
                for name in i.values:
                    yield from wait(name)
                channels[(group, i.dst), i.tag] = [(name, held[name]) for name in i.values]
            case Recv():
                assert not held.keys() & set(i.values), "a value is there already"
                held.update(dict.fromkeys(i.values, ((i.src, group), i.tag)))
            case HostCall():
                for name in i.values:
                    yield from wait(name)
                found.callbacks[i.callback, str(i.task), *(held[name].read() for name in i.values)] += 1
            case Free():
                for name in i.values:
                    del held[name]
        yield False
    results = [leaf for leaf in plan.outputs if group in leaf.mpmd_idxs]
    for leaf in results:
        yield from wait(leaf.name)
        found.results[leaf.path, group] = held[leaf.name].read()
    kept = {leaf.name for leaf in plan.inputs if not leaf.donated} | {leaf.name for leaf in plan.constants}
    assert held.keys() <= kept | {leaf.name for leaf in results}, "something is left over"
