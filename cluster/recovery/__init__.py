"""Has a mesh survive the death of its groups, and moves groups to other nodes or devices.

To read in order:

- what is asked of groups: ``runtime`` (by steps, arrays and checkpoints), ``requests`` (so that it can be
  asked again), ``journal`` and ``logged`` (the log of it, and the snapshots to go back to), ``saving``
  (checkpoints in storage);
- what is decided: ``membership``, of ``events`` and ``actions``, with ``replacement`` (when a group dies),
  ``moves`` (when one has to leave its node), and ``rewinds``, ``rewind`` and ``comparison`` (when steps are
  repeated with nobody dead, to notice wrong bits); ``policy`` (when to take a snapshot, and when to give up);
- how it is carried out: ``shell``, ``migrations`` (which groups are to move), ``process_pool`` (the
  processes), ``liveness_waiter`` (waits for them), ``replacements`` (what takes their place), ``allocations``
  and ``sharing`` (on which nodes and devices), ``termination`` (what is told to end), ``keepers`` and
  ``copies`` (who has the copies of a group's snapshot);
- in a process: ``actor`` and ``store`` (of such copies);
- ``report`` and ``metrics``.
"""

from cluster.recovery.policy import Recovery
from cluster.recovery.report import CorruptionReport, FoundValue, RecoveryReport

__all__ = ["CorruptionReport", "FoundValue", "Recovery", "RecoveryReport"]
