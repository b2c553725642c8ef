"""When to copy values, which process keeps whose copies, and when to give up: the policy of recovery.

Nothing here knows Ray, a thread or the clock.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cluster.process_info import ProcessInfo
from mpmd.errors import GroupDiedError, StateLostError
from mpmd.runtime.journal import BEGINNING, Journal, LoggedStep

_LOG_BYTES = 2**30
"""The most host arrays, batches above all, that the log may hold before a step waits for a snapshot."""

_LOG_INTERVALS = 4
"""A step waits for a snapshot that takes longer than so many intervals between snapshots."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Has a mesh survive the death of its groups, when given to ``cluster.launch``.

    Attributes:
      every: the steps from one snapshot of all values to the next. After a death at most so many steps, and
        those since, are run again.
      max_failures: how many times in all the groups may go back before the run is given up.
      spares: processes that are started besides, and wait for one of the others to die. They take a dead
        process's place at once; a process that has to be started needs some seconds. They need resources of
        their own, and groups that are alike.
      share_after: seconds that a group whose node is gone waits for room on another one. Then it shares the
        devices of another group, and the run goes on, slower, until the cluster has room again; then the
        group moves to a place of its own. Where it has shared before, it does not wait. ``None``: groups
        never share, and the run ends when there is no room within ``launch``'s ``timeout``.

    Raises: ``ValueError`` for numbers that cannot be.
    """

    every: int = 10
    max_failures: int = 3
    spares: int = 0
    share_after: float | None = 10.0

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be an int of at least {least}, not {value!r}"
            for name, value, least in (
                ("every", self.every, 1),
                ("max_failures", self.max_failures, 1),
                ("spares", self.spares, 0),
            )
            if not isinstance(value, int) or isinstance(value, bool) or value < least
        ]
        seconds = self.share_after
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 <= seconds < math.inf):
            faults.append(f"share_after must be None or a number of seconds from 0, not {seconds!r}")
        if faults:
            raise ValueError("Recovery: " + "; ".join(faults))

    def snapshot_is_due(self, journal: Journal) -> bool:
        """Whether to begin a snapshot now, after a step: after the first one, and then now and again."""
        if journal.snapshot is not None or not journal.steps_since_snapshot:
            return False
        return (
            journal.committed == BEGINNING
            or journal.steps_since_snapshot >= self.every
            or journal.nbytes >= _LOG_BYTES // 2
        )

    def is_late(self, journal: Journal) -> bool:
        """Whether the next step has to wait until the snapshot under way is committed."""
        if journal.snapshot is None:
            return False
        return journal.num_steps >= _LOG_INTERVALS * self.every or journal.nbytes >= _LOG_BYTES


def check_recovery(recovery: Recovery | None, submeshes: Sequence[Mapping[str, int]]) -> None:
    """Raises ``ValueError`` when groups with these submeshes cannot recover as they are asked to."""
    if recovery is None:
        return
    if len(submeshes) < 2:
        raise ValueError("recovery needs two groups at least: each keeps a copy of another one's values")
    if recovery.spares and any(dict(axes) != dict(submeshes[0]) for axes in submeshes):
        raise ValueError("Recovery(spares=...) needs groups that are alike: a spare takes any one's place")


DIED, DRAINED, SHRUNK, GROWN = "died", "drained", "shrunk", "grown"
"""Why a group is replaced: its process has died; or it moves, because its node is to end, because it is to
share the devices of another one, or because there is a place of its own for it again."""


@dataclasses.dataclass(frozen=True)
class RecoveryReport:
    """One recovery, or one move of a group to another place, in ``mesh.recoveries``.

    Attributes:
      mpmd_idxs: the groups that had died, or the one that has moved.
      reason: how that was noticed, or why it has moved.
      step: the step, counted from 1, that the first of them was at; ``None`` when it was at none.
      num_replayed: the steps that were run again.
      seconds: how long each phase took: for a move first ``prepared``, until a process was up at the other
        place, while steps ran, and ``copied``, until there was a snapshot; then ``started``, until a process
        was there in place of each dead one, and the others had stopped; ``connected``; ``loaded``, until it
        had the programs; ``restored``, until all had the values of the snapshot; ``replayed``, until they
        had run all steps since, which does not keep the caller waiting.
      lost: why the values of all groups were lost, so that no step was run again; ``None`` if they were not.
      kind: ``died``; or for a move ``drained``, because its node is to end, ``shrunk``, to share the devices
        of another group, or ``grown``, to a place of its own.
      shares_with: those of the groups that have no place of their own now, and the group whose devices each
        shares.
    """

    mpmd_idxs: tuple[int, ...]
    reason: str
    step: int | None
    num_replayed: int
    seconds: Mapping[str, float]
    lost: str | None = None
    kind: str = DIED
    shares_with: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds from noticing the death, or from the decision to move, until all was as before."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        groups = ", ".join(f"group {mpmd_idx}" for mpmd_idx in self.mpmd_idxs)
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        at = "" if self.step is None else f" at step {self.step}"
        reason = self.reason.partition(". ")[0]  # Ray has several sentences
        until = "mesh.resize asks for more places" if self.kind == SHRUNK else "the cluster has room again"
        sharing = "".join(
            f"; group {guest} shares the devices of group {host} until {until}"
            for guest, host in sorted(self.shares_with.items())
        )
        what = "recovered" if self.kind == DIED else f"moved ({self.kind})"
        then = f"{self.num_replayed} steps run again" if self.lost is None else "all values lost"
        why = "" if self.lost is None else f"; {self.lost}"
        return f"{what} {groups}{at} in {self.total:.2f} s ({phases}; {then}): {reason}{why}{sharing}"


def check_num_places(num_places: int, num_groups: int) -> None:
    """Raises ``TypeError`` or ``ValueError`` when groups cannot have so many places of their own."""
    if not isinstance(num_places, int) or isinstance(num_places, bool):
        raise TypeError(f"resize takes a number of groups, not {num_places!r}")
    if not 1 <= num_places <= num_groups:
        raise ValueError(
            f"resize: from 1 to {num_groups} of the {num_groups} groups can have a place of their own, "
            f"not {num_places}"
        )


def loss_of_values(death: GroupDiedError, reason: str, checkpoint: str | None) -> StateLostError:
    """The error of who asks for values that no process has any more.

    Args:
      reason: why nobody has them.
      checkpoint: the last one that is known.
    """
    known = "" if checkpoint is None else f". The last one that was saved or read here is {checkpoint}"
    message = (
        f"{str(death).rstrip('.')}. The values of all groups are lost, because {reason}. The mesh goes on: "
        f"restore the state from a checkpoint, such as by step.restore(path), or make it anew{known}"
    )
    return StateLostError(message, death.mpmd_idx, checkpoint)


class FailureCounter:
    """Counts deaths, and says when it is no use to go on."""

    def __init__(self, max_failures: int):
        self._max_failures = max_failures
        self._count = 0
        self._last: tuple[int, int] | None = None

    def count(self, mpmd_idx: int, step: LoggedStep | None) -> str | None:
        """Counts the death of a group.

        Args:
          step: what the group was running; ``None`` when it ran no step, or was being replaced.

        Returns: why to give up; ``None`` to recover.
        """
        self._count += 1
        now = None if step is None else (step.ordinal, mpmd_idx)
        repeated, self._last = now is not None and now == self._last, now
        if repeated and step is not None:
            return f"step {step.ordinal} has ended the process of group {mpmd_idx} twice"
        if self._count > self._max_failures:
            return f"the groups have failed {self._count} times, and max_failures is {self._max_failures}"
        return None


def choose_keepers(processes: Sequence[ProcessInfo]) -> list[int]:
    """Which process keeps the snapshots of each, in its host's memory: one of another group.

    It is on another node if there is one, and all keep as many as the others, as far as possible; then it is
    of the next group. All are named by their positions.

    Args:
      processes: of all groups, group by group; there are two groups at least.
    """
    num_groups = processes[-1].mpmd_idx + 1
    kept: collections.Counter[int] = collections.Counter()
    keepers = []
    for owner in processes:
        others = [i for i, process in enumerate(processes) if process.mpmd_idx != owner.mpmd_idx]
        keeper = min(
            others,
            key=lambda i: (
                processes[i].node_id == owner.node_id,
                kept[i],
                (processes[i].mpmd_idx - owner.mpmd_idx) % num_groups,
                abs(processes[i].rank - owner.rank),
            ),
        )
        kept[keeper] += 1
        keepers.append(keeper)
    return keepers


class Copy(NamedTuple):
    """The snapshot of a process is to be copied from one process to another."""

    owner: int
    src: int
    dst: int


class CopyHolders:
    """Which processes have the committed snapshot of each: itself, and its keeper. All by their positions."""

    def __init__(self, keepers: Sequence[int]):
        self._holders = [{owner, keeper} for owner, keeper in enumerate(keepers)]

    def lose(self, processes: Iterable[int]) -> None:
        """These processes are gone, with all they had."""
        for holders in self._holders:
            holders.difference_update(processes)

    @property
    def lost(self) -> list[int]:
        """The processes whose snapshot no process has."""
        return [owner for owner, holders in enumerate(self._holders) if not holders]

    def missing(self, keepers: Sequence[int]) -> list[Copy]:
        """What to copy so that every process has its own snapshot, and so has its keeper."""
        return [
            Copy(owner, owner if owner in holders else min(holders), wanted)
            for owner, (keeper, holders) in enumerate(zip(keepers, self._holders, strict=True))
            for wanted in (owner, keeper)
            if wanted not in holders
        ]
