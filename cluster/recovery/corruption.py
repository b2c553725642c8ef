"""Wrong bits that were noticed, by a rewind or when a snapshot was taken, and the reaction to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.comparison import Difference, FaultKind, faulty_groups
from cluster.recovery.policy import RAISE, REPLACE, WARN
from cluster.recovery.report import CorruptionReport
from mpmd.errors import SilentCorruptionError
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.replicas import Holder, UnequalReplicas, inconclusive_text, unequal_replicas

_HARMLESS = (FaultKind.COPY, FaultKind.INCONCLUSIVE)
"""These end no run: there is another copy, or the values are copied again; or it may be no fault."""

_UNKNOWN = (
    'on_corruption="replace" replaces no group, because it cannot be told which one is wrong. '
    "Start again from a checkpoint"
)


class Finding(NamedTuple):
    """A difference, and the report on it."""

    difference: Difference
    report: CorruptionReport


class Reaction(NamedTuple):
    """The consequences of findings: reports, and the error that ends the run or the groups to replace."""

    reports: Actions
    error: SilentCorruptionError | None = None
    replaced: frozenset[int] = frozenset()


class Reactions:
    """Reacts to findings as ``Recovery(on_corruption=...)`` says.

    What is inconclusive is said once: it is the same at each comparison.
    """

    def __init__(self, on_corruption: str):
        self._on_corruption = on_corruption
        self._said: set[str] = set()

    def react(self, findings: Sequence[Finding]) -> Reaction:
        """The reaction to all that was noticed at one point."""
        reports: Actions = [do.ReportCorruption(each.report) for each in findings if self._is_new(each)]
        serious = [each for each in findings if each.difference.kind not in _HARMLESS]
        if not serious or self._on_corruption == WARN:
            return Reaction(reports)
        faulty = faulty_groups(each.difference for each in serious)
        if self._on_corruption == REPLACE and faulty is not None:
            return Reaction(reports, replaced=faulty)
        texts = [str(each.report) for each in serious]
        if self._on_corruption != RAISE:
            texts.append(_UNKNOWN)
        groups = dict.fromkeys(mpmd_idx for each in serious for mpmd_idx in each.report.mpmd_idxs)
        return Reaction(reports, SilentCorruptionError("\n".join(texts), tuple(groups)))

    def _is_new(self, finding: Finding) -> bool:
        text = finding.report.text
        if finding.difference.kind is FaultKind.INCONCLUSIVE:
            if text in self._said:
                return False
            self._said.add(text)
        return True


def replica_findings(processes: Sequence[ProcessDigests], then: str) -> list[Finding]:
    """The copies of values in these processes that are unequal, by the devices that have them.

    Args:
      then: a sentence about the state of the groups, for reports of wrong copies.
    """
    by_holders: dict[tuple[Holder, ...], list[UnequalReplicas]] = {}
    inconclusive: dict[tuple[int, ...], list[UnequalReplicas]] = {}
    for unequal in unequal_replicas(processes):
        if unequal.is_conclusive:
            by_holders.setdefault(unequal.suspects, []).append(unequal)
        else:
            inconclusive.setdefault(unequal.mpmd_idxs, []).append(unequal)
    wrong = [(_of_replicas(each), then) for each in by_holders.values()]
    unknown = [
        (Difference(FaultKind.INCONCLUSIVE, groups, None, text=inconclusive_text(each)), _NOT_NOTICED)
        for groups, each in inconclusive.items()
    ]
    return [
        Finding(each, CorruptionReport.of(each, tuple(processes), sentence))
        for each, sentence in (*wrong, *unknown)
    ]


def _of_replicas(unequal: Sequence[UnequalReplicas]) -> Difference:
    """Copies of values that the same devices have otherwise than others."""
    first = unequal[0]
    more = f", and so for {len(unequal) - 1} more" if len(unequal) > 1 else ""
    devices = tuple(holder.device for holder in first.suspects)
    kind, ambiguous = FaultKind.REPLICA, first.is_ambiguous
    return Difference(kind, first.mpmd_idxs, None, devices, (), f"{first}{more}", ambiguous)


_NOT_NOTICED = "Wrong bits of such values are not noticed"
