"""The slices of a value that processes send to one another when it goes from one group to another.

Groups of different shapes and numbers of processes divide a value into different regions. The sender and the
receiver both compute the transfers, from the shape, the specs, the submeshes and the numbers of processes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.ir.plan import Aval, Spec
from mpmd.ir.specs import axes_of, dimensions_of, indivisible
from mpmd.util.grouping import grouped

Interval = tuple[int, int]
"""The first index, and the index after the last."""

Box = tuple[Interval, ...]
"""A region of a value: an interval for each dimension."""

_SHARED_BYTES = 2**16
"""The least bytes of a region that all its holders send, a slice each."""

GATHERED_BYTES = 2**22
"""The least bytes of a value that pays an all-gather in the receiver, in place of repeated messages."""


@dataclasses.dataclass(frozen=True)
class GroupShape:
    """The submesh of a group, and the number of processes that share its devices.

    Attributes:
      axes: the axis names and sizes of the submesh, in order.
      num_processes: the number of processes; each has equally many devices, which are consecutive in the C
        order of the submesh.
    """

    axes: Mapping[str, int]
    num_processes: int = 1

    @property
    def devices_per_process(self) -> int:
        return math.prod(self.axes.values()) // self.num_processes


def landing_spec(aval: Aval, spec: Spec, group: GroupShape) -> Spec:
    """A spec in which fewer processes of a group hold the same elements than in ``spec``; or ``spec`` itself.

    It shards the value over further axes, so an all-gather within the group makes the value as in ``spec``.
    An axis by which no dimension divides is left out. Values below ``GATHERED_BYTES`` keep their spec.
    """
    if group.num_processes == 1 or aval.nbytes < GATHERED_BYTES:
        return spec
    entries, used = [*dimensions_of(spec, len(aval.shape))], axes_of(spec)
    fewest = _elements_held(aval.shape, spec, group)
    for axis in (axis for axis in group.axes if axis not in used):
        for dimension in range(len(entries)):
            finer = [*entries]
            finer[dimension] = (*entries[dimension], axis)
            if any(indivisible(tuple(finer), aval.shape, group.axes)):
                continue
            if (held := _elements_held(aval.shape, tuple(finer), group)) < fewest:
                entries, fewest, spec = finer, held, tuple(finer)
                break
    return spec


def _elements_held(shape: Sequence[int], spec: Spec, group: GroupShape) -> int:
    """The elements that the processes of a group hold; an element counts once for each holder."""
    return sum(volume(box) for boxes in boxes_by_process(shape, spec, group) for box in boxes)


class Transfer(NamedTuple):
    """A region of a value that process ``src`` of one group sends to process ``dst`` of another one."""

    src: int
    dst: int
    box: Box


def boxes_by_process(shape: Sequence[int], spec: Spec, group: GroupShape) -> tuple[tuple[Box, ...], ...]:
    """The different regions of a value that the devices of each process of a group hold."""
    held: list[dict[Box, None]] = [{} for _ in range(group.num_processes)]
    coordinates = itertools.product(*map(range, group.axes.values()))
    for device, at in enumerate(coordinates):
        position = dict(zip(group.axes, at, strict=True))
        held[device // group.devices_per_process][_box(shape, spec, group.axes, position)] = None
    return tuple(tuple(boxes) for boxes in held)


def _box(shape: Sequence[int], spec: Spec, axes: Mapping[str, int], position: Mapping[str, int]) -> Box:
    box = []
    for size, sharding in zip(shape, dimensions_of(spec, len(shape)), strict=False):
        index, parts = 0, 1
        for axis in sharding:
            index, parts = index * axes[axis] + position[axis], parts * axes[axis]
        assert size % parts == 0, f"{size} elements do not divide into {parts} parts, which JAX refuses, too"
        length = size // parts
        box.append((index * length, (index + 1) * length))
    return tuple(box)


def transfers(aval: Aval, src_spec: Spec, src: GroupShape, dst_spec: Spec, dst: GroupShape) -> list[Transfer]:
    """The transfers by which every process of ``dst`` gets the shards of its devices, each element once.

    A region is the intersection of a sender's shard with a receiver's. Of several processes that hold a
    region, the process with the fewest elements to send so far sends it; regions with few holders are
    assigned first. Adjacent regions between the same two processes are merged. A region that several
    processes read travels to each.
    """
    holders = _processes_by_box(boxes_by_process(aval.shape, src_spec, src))
    readers = _processes_by_box(boxes_by_process(aval.shape, dst_spec, dst))
    common_pieces = [
        _Piece(common, senders, reader)
        for (held, senders), (box, processes) in itertools.product(holders.items(), readers.items())
        if (common := intersection(held, box)) is not None
        for reader in processes
    ]
    demand = collections.Counter(piece.senders for piece in common_pieces)
    pieces = [
        piece._replace(box=part)
        for piece in common_pieces
        for part in _shared(piece.box, len(piece.senders), demand[piece.senders], aval.itemsize)
    ]
    pieces.sort(key=lambda piece: (len(piece.senders), -volume(piece.box)))
    load: collections.Counter[int] = collections.Counter()
    boxes: dict[tuple[int, int], list[Box]] = collections.defaultdict(list)
    for box, senders, reader in pieces:
        sender = min(senders, key=lambda p: (load[p], (p - reader) % src.num_processes))
        load[sender] += volume(box)
        boxes[sender, reader].append(box)
    return [Transfer(*way, box) for way in sorted(boxes) for box in merged(boxes[way])]


class _Piece(NamedTuple):
    box: Box
    senders: tuple[int, ...]
    reader: int


def _processes_by_box(boxes: Iterable[Iterable[Box]]) -> dict[Box, tuple[int, ...]]:
    processes = grouped((box, process) for process, held in enumerate(boxes) for box in held)
    return {box: tuple(holders) for box, holders in processes.items()}


def _shared(box: Box, num_senders: int, num_pieces: int, itemsize: int) -> Iterator[Box]:
    """Cuts a large box along its longest dimension into the fewest parts that load its senders evenly.

    Args:
      num_pieces: the number of boxes that these senders send.
    """
    num_parts = num_senders // math.gcd(num_senders, num_pieces)
    dimension = max(range(len(box)), key=lambda d: box[d][1] - box[d][0], default=0)
    if num_parts == 1 or volume(box) * itemsize < _SHARED_BYTES:
        yield box
        return
    start, stop = box[dimension]
    edges = [start + (stop - start) * i // num_parts for i in range(num_parts + 1)]
    for interval in itertools.pairwise(edges):
        if interval[0] < interval[1]:
            yield (*box[:dimension], interval, *box[dimension + 1 :])


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(interval.indices(size)[:2] for interval, size in zip(index, shape, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; ``None`` if it is empty. A scalar's box has no dimensions."""
    both = tuple((max(low, first), min(high, last)) for (low, high), (first, last) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of a box in an array that has the elements of an ``outer`` one."""
    return tuple(
        slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True)
    )


def merged(boxes: Iterable[Box]) -> list[Box]:
    """Fewer boxes with the same elements: those side by side along one dimension become one."""
    fewer = list(boxes)
    for dimension in reversed(range(len(fewer[0]) if fewer else 0)):
        fewer = _merged_along(fewer, dimension)
    return fewer


def _merged_along(boxes: Iterable[Box], dimension: int) -> list[Box]:
    rows = grouped(((box[:dimension], box[dimension + 1 :]), box[dimension]) for box in boxes)
    result = []
    for (before, after), intervals in rows.items():
        disjoint: list[Interval] = []
        for start, stop in sorted(intervals):
            if disjoint and disjoint[-1][1] == start:
                start = disjoint.pop()[0]
            disjoint.append((start, stop))
        result += [(*before, interval, *after) for interval in disjoint]
    return result
