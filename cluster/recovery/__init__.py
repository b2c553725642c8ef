"""Has a mesh survive the death of its groups, and moves groups to other nodes or devices.

To read in order:

- the requests to groups: ``runtime`` (by steps, arrays and checkpoints), ``ledger`` (logs, sends and
  repeats requests), ``journal`` and ``logged`` (the log of requests, and the snapshots to go back to);
- the decisions: ``membership``, of ``events`` and ``actions``, with ``replacement`` (when a
  group dies), ``snapshots``, ``moves`` (when a group has to leave its node), and ``rewinds`` and
  ``comparison`` (when steps are repeated with nobody dead, to notice wrong bits); ``left_out`` (the groups
  that recovery leaves out); ``policy`` (when to take a snapshot, and when to give up);
- how decisions are carried out: ``shell``, ``procedures`` (the phases of a recovery, of going back and of a
  rewind), ``processes`` (who is alive, and who has to move), ``spares`` (processes that stand by, and take
  the place of others), ``allocations`` (on which nodes and devices), ``keepers`` and ``copies`` (who has the
  copies of a group's snapshot);
- in a process: ``actor`` and ``store`` (the copies in its host memory);
- ``report`` and ``metrics``.
"""

from cluster.recovery.policy import Recovery
from cluster.recovery.report import CorruptionReport, FoundValue, RecoveryReport

__all__ = ["CorruptionReport", "FoundValue", "Recovery", "RecoveryReport"]
