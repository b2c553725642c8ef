"""How the values of a plan's messages travel between the processes of groups."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpmd.ir import Aval, Name, Plan, Recv, Send, Spec
from mpmd.reshard import Box, GroupShape, Transfer, transfers
from mpmd.specs import fitting


class Part(NamedTuple):
    """A part of one of the values of a message."""

    value: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Route:
    """How a message travels: for each of its values, the transfers between processes of the two groups."""

    avals: tuple[Aval, ...]
    transfers: tuple[tuple[Transfer, ...], ...]

    def sent_by(self, process: int) -> dict[int, tuple[Part, ...]]:
        """What a process of the sender sends to each process of the receiver."""
        return self._parts(lambda transfer: transfer.dst if transfer.src == process else None)

    def received_by(self, process: int) -> dict[int, tuple[Part, ...]]:
        """What a process of the receiver gets from each process of the sender, in the order it is sent."""
        return self._parts(lambda transfer: transfer.src if transfer.dst == process else None)

    def _parts(self, peer_of) -> dict[int, tuple[Part, ...]]:
        parts: dict[int, list[Part]] = collections.defaultdict(list)
        for value, of_value in enumerate(self.transfers):
            for transfer in of_value:
                if (peer := peer_of(transfer)) is not None:
                    parts[peer].append(Part(value, transfer.box))
        return {peer: tuple(found) for peer, found in sorted(parts.items())}


def find_routes(plan: Plan, groups: Sequence[GroupShape], mpmd_idx: int) -> dict[tuple[int, int, int], Route]:
    """The routes of the messages that a group sends or receives, by source, destination and tag.

    The plan has no open specs.
    """
    find_transfers = functools.cache(_transfers_between(groups))
    specs = [held_specs(plan, i, group.axes) for i, group in enumerate(groups)]
    routes = {}
    for program in plan.programs:
        src = program.mpmd_idx
        for send in (i for i in program.instructions if isinstance(i, Send)):
            if mpmd_idx in (src, send.dst):
                routes[src, send.dst, send.tag] = Route(
                    avals=tuple(plan.avals()[name] for name in send.values),
                    transfers=tuple(
                        find_transfers(
                            plan.avals()[name], src, specs[src][name], send.dst, specs[send.dst][name]
                        )
                        for name in send.values
                    ),
                )
    return routes


def _transfers_between(groups: Sequence[GroupShape]):
    def between(aval: Aval, src: int, src_spec: Spec, dst: int, dst_spec: Spec) -> tuple[Transfer, ...]:
        return tuple(transfers(aval, src_spec, groups[src], dst_spec, groups[dst]))

    return between


def held_specs(plan: Plan, mpmd_idx: int, axes: Mapping[str, int]) -> Mapping[Name, Spec]:
    """How a group's submesh shards each value that the group has. The plan has no open specs.

    A value that is received takes the sharding that its first reader was compiled for; a result that nothing
    here reads takes that of the result, or is replicated where this does not fit.

    Args:
      axes: the names and sizes of the axes of the group's submesh.
    """
    program = plan.programs[mpmd_idx]
    specs: dict[Name, Spec | None] = {leaf.name: () for leaf in plan.constants_of(mpmd_idx)}
    specs |= {leaf.name: leaf.spec for leaf in plan.inputs_of(mpmd_idx).values() if leaf.name}
    for run in program.runs:
        executable = plan.executable(run.executable)
        for name, spec in zip(run.inputs, executable.in_specs, strict=True):
            specs.setdefault(name, spec)
        specs |= zip(run.outputs, executable.out_specs, strict=True)
    outputs = {leaf.name: fitting(leaf.spec or (), leaf.aval.shape, axes) for leaf in plan.outputs}
    for instruction in program.instructions:
        if isinstance(instruction, Recv):
            for name in instruction.values:
                specs.setdefault(name, outputs.get(name))
    return {name: spec or () for name, spec in specs.items()}
