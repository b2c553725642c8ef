"""Finds copies of a value that are to be equal, and are not.

The devices of a group that have the same shard of a value compute it by the same executable. A group that
has a value from another one has its bits. So their digests are equal, unless a device computes or keeps
wrong bits; nothing has to be computed again to see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpmd.runtime.digests import ProcessDigests
from mpmd.util.grouping import grouped


@dataclasses.dataclass(frozen=True)
class UnequalReplicas:
    """A shard of a value that has several contents.

    Attributes:
      holders: for each content the devices that have it, as text.
      is_conclusive: whether all holders have to compute the same bits.
    """

    mpmd_idxs: tuple[int, ...]
    type: str
    holders: tuple[str, ...]
    is_conclusive: bool

    def __str__(self) -> str:
        return f"copies of a {self.type} differ: {'; '.join(self.holders)}"


class _Replica(NamedTuple):
    process: ProcessDigests
    device: str
    digest: int
    is_received: bool


def unequal_replicas(processes: Iterable[ProcessDigests]) -> tuple[UnequalReplicas, ...]:
    """The shards whose copies differ, of all values in these processes.

    Copies of several groups are compared where all but one have received them. Copies that processes of one
    group have computed on different processors, with other threads, flags or versions, may rightly differ:
    then that is not conclusive.
    """
    copies = grouped(
        ((handle, value.type, box), _Replica(process, device, digest, value.is_received))
        for process in processes
        for handle, value in process.values.items()
        for device, box, digest in value.shards
    )
    return tuple(
        _unequal(type, comparable)
        for (_, type, _), of_shard in copies.items()
        for comparable in _comparable(of_shard)
        if len({copy.digest for copy in comparable}) > 1
    )


def _comparable(copies: Sequence[_Replica]) -> list[list[_Replica]]:
    """Groups copies that must be equal: all copies together or, if several groups computed the value, the
    copies of each group."""
    by_group = grouped((copy.process.mpmd_idx, copy) for copy in copies)
    computed = {copy.process.mpmd_idx for copy in copies if not copy.is_received}
    return [list(copies)] if len(computed) <= 1 else list(by_group.values())


def _unequal(type: str, copies: Sequence[_Replica]) -> UnequalReplicas:
    devices = grouped(
        (digest, f"{device} of group {process.mpmd_idx} ({process.place})")
        for process, device, digest, _ in copies
    )
    return UnequalReplicas(
        tuple(sorted({copy.process.mpmd_idx for copy in copies})),
        type,
        tuple(map(", ".join, devices.values())),
        len({copy.process.kind for copy in copies if not copy.is_received}) <= 1,
    )


def inconclusive_text(unequal: Sequence[UnequalReplicas]) -> str:
    groups = sorted({mpmd_idx for each in unequal for mpmd_idx in each.mpmd_idxs})
    names = " and ".join(f"group {mpmd_idx}" for mpmd_idx in groups)
    return (
        f"inconclusive: copies of {len(unequal)} values differ on {names}, such as of a {unequal[0].type}, "
        "and may rightly do so: processes have computed them on other processors, with other threads "
        "(NPROC), flags or versions"
    )
