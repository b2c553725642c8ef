"""The routes of a plan's messages between the processes of groups, and their bytes."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from mpmd.ir.messages import sends_of
from mpmd.ir.plan import Aval, Edge, Name, Plan, Recv, Spec
from mpmd.ir.reshard import Box, GroupShape, Transfer, landing_spec, transfers, volume
from mpmd.ir.specs import fitting
from mpmd.util.grouping import grouped


@dataclasses.dataclass(frozen=True)
class Topology:
    """The processes of all groups, between which the plan's messages travel.

    Attributes:
      groups: the shape of each group.
      gathering: the edges over which a large value travels once, even if several processes of the receiver
        read the same regions: the receiver all-gathers the value.
    """

    groups: tuple[GroupShape, ...]
    gathering: frozenset[Edge] = frozenset()


class Slice(NamedTuple):
    value: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Passage:
    """The way of a value from one group to another.

    Attributes:
      transfers: the transfers between processes of the two groups.
      landing: the spec of the value when it arrives at the receiver.
      spec: the spec by which the receiver's tasks read the value. If ``landing`` differs, the receiver
        gathers the value.
    """

    aval: Aval
    transfers: tuple[Transfer, ...]
    landing: Spec
    spec: Spec

    @functools.cached_property
    def bytes_by_processes(self) -> Mapping[tuple[int, int], int]:
        sent: collections.Counter[tuple[int, int]] = collections.Counter()
        for src, dst, box in self.transfers:
            sent[src, dst] += volume(box) * self.aval.itemsize
        return dict(sent)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_processes.values())


@dataclasses.dataclass(frozen=True)
class Route:
    passages: tuple[Passage, ...]

    def sent_by(self, process: int) -> dict[int, tuple[Slice, ...]]:
        return self._slices(lambda transfer: transfer.dst if transfer.src == process else None)

    def received_by(self, process: int) -> dict[int, tuple[Slice, ...]]:
        return self._slices(lambda transfer: transfer.src if transfer.dst == process else None)

    def _slices(self, peer_of) -> dict[int, tuple[Slice, ...]]:
        slices = grouped(
            (peer, Slice(value, transfer.box))
            for value, passage in enumerate(self.passages)
            for transfer in passage.transfers
            if (peer := peer_of(transfer)) is not None
        )
        return {peer: tuple(of_peer) for peer, of_peer in sorted(slices.items())}


class Routes:
    """The routes of all messages of a plan, which has no open specs."""

    def __init__(self, plan: Plan, topology: Topology):
        self._plan = plan
        self._topology = topology
        self._specs = [held_specs(plan, i, group.axes) for i, group in enumerate(topology.groups)]
        self._find = functools.cache(functools.partial(_passage, topology))

    def of_value(self, edge: Edge, name: Name) -> Passage:
        src, dst = edge
        return self._find(self._plan.avals()[name], edge, self._specs[src][name], self._specs[dst][name])

    def of_group(self, mpmd_idx: int) -> dict[tuple[int, int, int], Route]:
        """The routes of the messages that a group sends or receives, by source, destination and tag."""
        return {
            (*edge, send.tag): Route(tuple(self.of_value(edge, name) for name in send.values))
            for edge, send in sends_of(self._plan)
            if mpmd_idx in edge
        }

    def sent_bytes(self) -> dict[Edge, dict[tuple[int, int], int]]:
        """The bytes of one step, by edge, and by the processes of the sender and the receiver."""
        sent: dict[Edge, collections.Counter[tuple[int, int]]] = collections.defaultdict(collections.Counter)
        for edge, send in sends_of(self._plan):
            for name in send.values:
                sent[edge].update(self.of_value(edge, name).bytes_by_processes)
        return {edge: dict(sorted(of_edge.items())) for edge, of_edge in sent.items()}


def bytes_per_step(plan: Plan, topology: Topology) -> int:
    return sum(sum(of_edge.values()) for of_edge in Routes(plan, topology).sent_bytes().values())


def _passage(topology: Topology, aval: Aval, edge: Edge, src_spec: Spec, dst_spec: Spec) -> Passage:
    src, dst = (topology.groups[group] for group in edge)
    landing = landing_spec(aval, dst_spec, dst) if edge in topology.gathering else dst_spec
    return Passage(aval, tuple(transfers(aval, src_spec, src, landing, dst)), landing, dst_spec)


def held_specs(plan: Plan, mpmd_idx: int, axes: Mapping[str, int]) -> Mapping[Name, Spec]:
    """The spec of each value that a group has. The plan has no open specs.

    A received value has the spec of the executable that reads it first; a received value that no executable
    of the group reads has the spec of the step's result, or is replicated where the spec does not fit.

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
