"""The policy of recovery: when to take a snapshot, and when to give up.

Nothing here knows Ray, a thread or the clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from cluster.recovery.journal import BEGINNING, FROM_DISK, Journal, LoggedStep
from mpmd.errors import GroupDiedError, StateLostError
from mpmd.meshes.part import ranges_of
from mpmd.validation import (
    Fault,
    choice_fault,
    int_fault,
    number_fault,
    raise_faults,
    shown,
    str_fault,
    type_fault,
)

RAISE, REPLACE, WARN = REACTIONS = ("raise", "replace", "warn")

UNLOCATED_REMEDY = (
    '. on_corruption="replace" replaces no group, because it cannot be told which one is wrong. '
    "Start again from a checkpoint"
)

_LOG_BYTES = 2**30
"""The most host arrays, batches above all, that the log may hold before a step waits for a snapshot."""

_LOG_INTERVALS = 4
"""The length of the log, in intervals between snapshots, at which the next step waits for the snapshot under
way. Also the number of snapshots in a row whose failure ends the run if the log is full."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Has a mesh survive the death of its groups, when given to ``mpmd.launch``.

    Attributes:
      every: the steps from one snapshot of all values to the next. After a death, the groups repeat at most
        these steps, and the steps run while the next snapshot was under way.
      max_failures: how many times in all the groups may go back before the run is given up.
      spares: processes that are started in addition, and wait for another process to die. They take a dead
        process's place at once; a process that has to be started needs some seconds. They need resources of
        their own, and groups that are alike.
      share_after: seconds that a group whose node is gone waits for room on another one. Then it shares the
        devices of another group, and the run goes on, slower, until the cluster has room again; then the
        group moves to a place of its own. Where it has shared before, it does not wait. ``None``: groups
        never share, and the run ends when there is no room within ``launch``'s ``timeout``.
      parts: ``{"sampler": None}`` leaves a part of the mesh out, whose values can be computed again, as
        weights by ``mpmd.reshard``: they are not copied, and its steps not run again. When one of its groups
        dies, steps of other parts go on, and its own raise ``GroupDiedError`` until
        ``mesh.replace("sampler")``.
      verify_every: the steps between two checks; the first check is after the first step. In a check, all
        groups go back to the last snapshot, repeat the steps since once, and are to compute the same bits.
        ``None``: no checks.
      on_corruption: the reaction to wrong bits: ``"raise"`` ends the run with
        ``mpmd.errors.SilentCorruptionError``; ``"replace"`` replaces the process of the group that was wrong
        as if it had died, and ends the run where it cannot be told which one was; ``"warn"`` goes on.
        ``mesh.corruptions`` has all reports.

    Raises: ``TypeError`` or ``ValueError`` for numbers out of range.
    """

    every: int = 10
    max_failures: int = 3
    spares: int = 0
    share_after: float | None = 10.0
    parts: Mapping[str, None] | None = dataclasses.field(default=None, hash=False)
    verify_every: int | None = None
    on_corruption: str = "raise"

    def __post_init__(self) -> None:
        what = "a number of seconds"
        raise_faults(
            int_fault("every", self.every),
            int_fault("max_failures", self.max_failures),
            int_fault("spares", self.spares, 0),
            number_fault("share_after", self.share_after, what, least=0, finite=True, optional=True),
            int_fault("verify_every", self.verify_every, optional=True),
            choice_fault("on_corruption", self.on_corruption, REACTIONS),
            *_parts_faults(self.parts),
            title="Recovery: ",
        )

    def check_is_due(self, journal: Journal, verified: int) -> bool:
        """Whether groups are to go back and repeat their steps now, after a step; first after the first one.

        Args:
          verified: the steps that were asked before the last check; 0 before the first check.
        """
        if self.verify_every is None or not journal.num_steps:
            return False
        return not verified or journal.num_asked - verified >= self.verify_every

    def snapshot_is_due(self, journal: Journal) -> bool:
        """Whether to begin a snapshot now, after a step: after the first one, and then now and again."""
        if journal.snapshot is not None or not journal.steps_since_snapshot:
            return False
        return (
            (journal.committed == BEGINNING and not journal.num_failed)
            or journal.steps_since_snapshot >= self.every
            or journal.nbytes >= _LOG_BYTES // 2
        )

    def is_late(self, journal: Journal) -> bool:
        """Whether the next step has to wait until the snapshot under way is committed."""
        return journal.snapshot is not None and self._is_full(journal)

    def may_go_on(self, journal: Journal) -> bool:
        """Whether steps may go on without the snapshot under way, which has failed."""
        return not self._is_full(journal) or journal.num_failed + 1 < _LOG_INTERVALS

    def _is_full(self, journal: Journal) -> bool:
        return journal.num_steps >= _LOG_INTERVALS * self.every or journal.nbytes >= _LOG_BYTES


_PARTS = 'a dict of names and None, as {"sampler": None}'


def _parts_faults(parts: Any) -> Iterator[Fault | None]:
    yield type_fault("parts", parts, Mapping, _PARTS, optional=True)
    for name, of_part in parts.items() if isinstance(parts, Mapping) else ():
        yield str_fault("the name of a part", name)
        if of_part is not None:
            yield TypeError(f"parts[{name!r}] must be None, which leaves the part out, not {shown(of_part)}")


def left_out_groups(recovery: Recovery | None, parts: Mapping[str, int] | None) -> frozenset[int]:
    """Raises ``ValueError`` for a part that the mesh does not have."""
    ranges, left_out = ranges_of(parts or {}), recovery.parts or {} if recovery else {}
    if unknown := [name for name in left_out if name not in ranges]:
        names, known = ", ".join(map(repr, unknown)), ", ".join(map(repr, ranges)) or "none"
        raise ValueError(f"Recovery(parts=...) names {names}, and the parts of the mesh are {known}")
    return frozenset(mpmd_idx for name in left_out for mpmd_idx in ranges[name])


def check_recovery(
    recovery: Recovery | None,
    submeshes: Sequence[Mapping[str, int]],
    left_out: Collection[int],
) -> None:
    """Raises ``ValueError`` when groups with these submeshes cannot recover as they are asked to."""
    if recovery is None:
        return
    if len(submeshes) < 2 or len(submeshes) - len(left_out) == 1:
        raise ValueError(
            "recovery needs two groups at least that it does not leave out: each keeps a copy of another "
            "one's values"
        )
    if recovery.spares and any(dict(axes) != dict(submeshes[0]) for axes in submeshes):
        raise ValueError("Recovery(spares=...) needs groups that are alike: a spare takes any one's place")


def loss_of_values(death: GroupDiedError, reason: str, checkpoint: str | None) -> StateLostError:
    """The error of requests for values that no process has any more."""
    known = "" if checkpoint is None else f". The last one that was saved or read here is {checkpoint}"
    message = (
        f"{str(death).rstrip('.')}. The values of all groups are lost, because {reason}. The mesh goes on: "
        f"restore the state from a checkpoint, such as by step.restore(path), or make it anew{known}"
    )
    return StateLostError(message, death.mpmd_idx, checkpoint)


def copying_fault(journal: Journal, error: BaseException) -> RuntimeError:
    return RuntimeError(
        f"the groups' values could not be copied {journal.num_failed + 1} times in a row, the last time "
        f"because {type(error).__name__}: {error}. The log of steps that a death would repeat may not grow "
        "any more. A process needs host memory for up to four times its part of the values: use hosts with "
        f"more memory or fewer processes each, or launch without recovery and save checkpoints. {FROM_DISK}"
    )


class FailureCounter:
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
