"""Finds copies of a value that are to be equal, and are not.

The devices of a group that have the same shard of a value compute it by the same executable. A group that
has a value from another one has its bits. So their digests are equal, unless a device computes or keeps
wrong bits; nothing has to be computed again to see it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpmd.ir.reshard import Box
from mpmd.runtime.digests import ProcessDigests


class Holder(NamedTuple):
    """A device that has a shard."""

    mpmd_idx: int
    device: str
    place: str


@dataclasses.dataclass(frozen=True)
class UnequalReplicas:
    """A shard of a value that has several contents.

    Attributes:
      handle, type, box: which shard of which value.
      suspects: the devices that have not the content of the majority; all, if no content has one.
      num_holders: how many devices have the shard.
      is_conclusive: whether all holders have to compute the same bits.
    """

    handle: int
    type: str
    box: Box
    suspects: tuple[Holder, ...]
    num_holders: int
    is_conclusive: bool

    def __str__(self) -> str:
        names = ", ".join(f"{h.device} of group {h.mpmd_idx} ({h.place})" for h in self.suspects)
        if len(self.suspects) < self.num_holders:
            return f"{names}: a {self.type} has other bits than on the other {self._others} devices"
        return f"{names}: each has other bits of the same {self.type}"

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The groups of the suspects."""
        return tuple(sorted({holder.mpmd_idx for holder in self.suspects}))

    @property
    def is_ambiguous(self) -> bool:
        """Whether one of several groups is wrong, and it cannot be told which."""
        return len(self.suspects) == self.num_holders and len(self.mpmd_idxs) > 1

    @property
    def _others(self) -> int:
        return self.num_holders - len(self.suspects)


class _Copy(NamedTuple):
    holder: Holder
    kind: tuple[str, ...]
    digest: int
    is_received: bool


def unequal_replicas(processes: Iterable[ProcessDigests]) -> tuple[UnequalReplicas, ...]:
    """The shards whose copies differ, of all values in these processes.

    Copies of several groups are compared where all but one have received them. Copies that processes of one
    group have computed on different processors, with other threads, flags or versions, may rightly differ:
    then that is not conclusive.
    """
    copies: dict[tuple[int, str, Box], list[_Copy]] = collections.defaultdict(list)
    for process in processes:
        for handle, value in process.values.items():
            for device, box, digest in value.shards:
                holder = Holder(process.mpmd_idx, device, process.place)
                key = handle, value.type, box
                copies[key].append(_Copy(holder, process.kind, digest, value.is_received))
    found = []
    for key, of_shard in copies.items():
        for comparable in _comparable(of_shard):
            if len({copy.digest for copy in comparable}) > 1:
                found.append(_unequal(*key, comparable))
    return tuple(found)


def _comparable(copies: Sequence[_Copy]) -> list[list[_Copy]]:
    """The copies that are to be equal: those of all groups, or, if several have computed theirs, of each."""
    by_group: dict[int, list[_Copy]] = collections.defaultdict(list)
    for copy in copies:
        by_group[copy.holder.mpmd_idx].append(copy)
    computed = {copy.holder.mpmd_idx for copy in copies if not copy.is_received}
    return [list(copies)] if len(computed) <= 1 else list(by_group.values())


def _unequal(handle: int, type: str, box: Box, copies: Sequence[_Copy]) -> UnequalReplicas:
    digests: dict[int, list[int]] = collections.defaultdict(list)
    for copy in copies:
        digests[copy.holder.mpmd_idx].append(copy.digest)
    # One vote for each group: its devices may all have what has arrived once.
    right = _majority([most for of_group in digests.values() if (most := _majority(of_group)) is not None])
    suspects = tuple(copy.holder for copy in copies if right is None or copy.digest != right)
    is_conclusive = len({copy.kind for copy in copies if not copy.is_received}) <= 1
    return UnequalReplicas(handle, type, box, suspects, len(copies), is_conclusive)


def _majority(digests: Sequence[int]) -> int | None:
    """Returns the digest that occurs most often; ``None`` for a tie."""
    counts = collections.Counter(digests).most_common(2)
    is_tie = len(counts) == 2 and counts[0][1] == counts[1][1]
    return counts[0][0] if counts and not is_tie else None


def inconclusive_text(unequal: Sequence[UnequalReplicas]) -> str:
    """The text on copies that differ and may rightly do so."""
    groups = sorted({mpmd_idx for each in unequal for mpmd_idx in each.mpmd_idxs})
    names = " and ".join(f"group {mpmd_idx}" for mpmd_idx in groups)
    return (
        f"inconclusive: copies of {len(unequal)} values differ on {names}, such as of a {unequal[0].type}, "
        "and may rightly do so: processes have computed them on other processors, with other threads "
        "(NPROC), flags or versions"
    )
