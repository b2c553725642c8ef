"""Reports on recoveries, and on moves of groups."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import NamedTuple

DIED, FAILED, REPLACED, CORRUPTED = "died", "failed", "replaced", "corrupted"
DRAINED, SHRUNK, GROWN = "drained", "shrunk", "grown"
"""The kinds of recoveries and moves. ``DIED``: a process has died, and its group is replaced. ``FAILED``: a
step has failed after its donated arguments were consumed, and all groups go back. ``REPLACED``: the user has
``mesh.replace`` restart a dead group of a part that recovery leaves out. ``CORRUPTED``: a group has had wrong
bits, and is replaced. A group moves because its node is to end (``DRAINED``), to share the devices of another
one (``SHRUNK``), or to a place of its own again (``GROWN``)."""


class Phases:
    """Adds up the seconds of the phases of one recovery or move.

    Attributes:
      seconds: by the name of a phase, such as ``restored``, in the order in which they were first entered.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._current: str | None = None
        self._since = 0.0

    def enter(self, name: str | None) -> None:
        """Ends the phase under way, and begins the phase ``name``; ``None`` begins no other phase."""
        now = time.perf_counter()
        if self._current is not None:
            self.seconds[self._current] += now - self._since
        if name is not None:
            self.seconds.setdefault(name, 0.0)
        self._current, self._since = name, now


@dataclasses.dataclass(frozen=True)
class RecoveryReport:
    """One recovery, or one move of a group to another place, in ``mesh.recoveries``.

    Attributes:
      mpmd_idxs: the groups that had died, or the group that has moved; none where a step has failed.
      reason: how that was noticed, or why it has moved.
      step: the step, counted from 1, that the first dead group was running; ``None`` when it ran no step.
      num_replayed: the steps that were run again.
      seconds: how long each phase took: for a move first ``prepared``, until a process was up at the other
        place, while steps ran, and ``copied``, until there was a snapshot; then ``started``, until each dead
        process was replaced, and the living ones had stopped; ``connected``; ``loaded``, until the new
        processes had the programs; ``restored``, until all groups had the values of the snapshot;
        ``replayed``, until all groups had run the steps since, which does not keep the caller waiting. After
        a failed step only ``restored`` and ``replayed``: no process is replaced, and none connects again.
      lost: why the values of all groups were lost, so that no step was run again; ``None`` if they were not.
      kind: ``died``, or ``failed`` where a step has; ``replaced``, by ``mesh.replace``; ``corrupted``,
        because a group has had wrong bits; or for a move ``drained``, because its node is to end, ``shrunk``,
        to share the devices of another group, or ``grown``, to a place of its own.
      shares_with: the groups of ``mpmd_idxs`` without a place of their own now, each with the group whose
        devices it shares.
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
        names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in self.mpmd_idxs)
        groups = f" {names}" if names else ""
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        at = "" if self.step is None else f" at step {self.step}"
        reason = self.reason.partition(". ")[0]  # Ray has several sentences
        until = "mesh.resize asks for more places" if self.kind == SHRUNK else "the cluster has room again"
        sharing = "".join(
            f"; group {guest} shares the devices of group {host} until {until}"
            for guest, host in sorted(self.shares_with.items())
        )
        kinds = {
            DIED: "recovered",
            CORRUPTED: "recovered",
            FAILED: "went back with all groups",
            REPLACED: "replaced",
        }
        what = kinds.get(self.kind, f"moved ({self.kind})")
        then = f"{self.num_replayed} steps run again" if self.lost is None else "all values lost"
        why = "" if self.lost is None else f"; {self.lost}"
        return f"{what}{groups}{at} in {self.total:.2f} s ({phases}; {then}): {reason}{why}{sharing}"


class FoundValue(NamedTuple):
    """The first NaN or infinity that was found when steps were repeated.

    Attributes:
      step: counted from 1.
      task: its name in the plan.
      mpmd_idx: the group.
      text: the task, the group and the value, for people.
      path: the directory that has the task, for ``mpmd replay``; ``None`` if it was not written.
    """

    step: int
    task: str
    mpmd_idx: int
    text: str
    path: str | None = None


COMPUTED, UNLOCATED, COPY = "computed", "unlocated", "copy"
"""The kinds of wrong bits."""


@dataclasses.dataclass(frozen=True)
class CorruptionReport:
    """Wrong bits that were noticed, in ``mesh.corruptions``.

    Attributes:
      kind: ``computed``: a group has computed different bits from the same inputs, or has kept different
        bits; ``unlocated``: two runs differ, and it cannot be told which group is wrong; ``copy``: a copy of
        a snapshot has changed.
      mpmd_idxs: the groups that were wrong, or that may have been; for a copy, no group is named.
      step: the first that differs, counted from 1; ``None`` where that is not known.
      devices: the devices of ``mpmd_idxs`` whose bits differ, if known.
      places: the processes of ``mpmd_idxs``, and their nodes.
      text: all of this for people.
    """

    kind: str
    mpmd_idxs: tuple[int, ...]
    step: int | None
    devices: tuple[str, ...]
    places: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def of_copies(text: str) -> CorruptionReport:
        return CorruptionReport(COPY, (), None, (), (), f"{text}. Nothing was computed from it")
