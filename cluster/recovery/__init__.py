"""Has a mesh survive the death of its groups, and moves groups to other nodes or devices.

To read in order:

- what is asked of groups: ``runtime`` (by steps, arrays and checkpoints), ``requests`` (so that it can be
  asked again), ``journal`` and ``logged`` (the log of it), ``saving`` (copies to storage);
- what is decided: ``membership``, of ``events`` and ``actions``, with ``replacement`` (when a group dies) and
  ``moves`` (when one has to leave its node); ``policy`` (when to copy, and when to give up);
- how it is carried out: ``shell``, ``migrations`` (which groups are to move), ``process_pool`` (the
  processes), ``liveness_waiter`` (waits for them), ``replacements`` (what takes their place), ``allocations``
  and ``sharing`` (on which nodes and devices), ``termination`` (what is told to end), ``keepers`` and
  ``copies`` (who has whose copies);
- in a process: ``actor`` and ``store`` (of copies);
- ``report`` and ``metrics``.
"""

from cluster.recovery.policy import Recovery
from cluster.recovery.report import RecoveryReport

__all__ = ["Recovery", "RecoveryReport"]
