"""Has a mesh survive the death of its groups, and moves groups to other nodes or devices.

To read in order:

- the requests to groups: ``runtime`` (by steps, arrays and checkpoints), ``ledger`` (logs, sends and
  repeats requests, and has the state of all groups), ``releases``, ``journal`` and ``logged`` (the log);
  ``lock`` (of the ledger);
  ``left_out`` (the groups that recovery leaves out);
- the operations on all groups: ``supervisor``, with ``replacement`` (when a group dies), ``rewinds`` and
  ``comparison`` (when steps are repeated with nobody dead, to notice wrong bits), ``snapshots``, ``moves``
  (when a group has to leave its node); ``policy`` (when to take a snapshot, and when to give up);
  ``background`` (threads);
- the processes: ``processes`` (who is alive, and who has to move), ``spares`` (processes that stand by, and
  take over from dead or moving ones), ``allocations`` (on which nodes and devices), ``copies`` (who
  has the copies of a group's snapshot);
- in a process: ``actor`` and ``store`` (the copies in its host memory);
- ``report``.
"""

from cluster.recovery.policy import Recovery
from cluster.recovery.report import CorruptionReport, FoundValue, RecoveryReport

__all__ = ["CorruptionReport", "FoundValue", "Recovery", "RecoveryReport"]
