"""Has a mesh survive the death of its groups, and moves groups to other nodes or devices.

To read in order:

- what is asked of groups: ``runtime`` (by steps, arrays and checkpoints), ``requests`` (so that it can be
  asked again), ``journal`` and ``logged`` (the log of it), ``snapshots`` (copies of all values), ``saving``
  (to storage);
- what happens to groups: ``replacer`` (when one dies), ``mover`` and ``migrations`` (when one has to leave
  its node), ``process_pool`` (the processes), ``liveness_waiter`` (waits for them), ``replacements`` (what
  takes their place), ``allocations`` and ``sharing`` (on which nodes and devices), ``termination`` (what is
  told to end), ``keepers`` and ``copies`` (who has whose copies);
- in a process: ``actor`` and ``store`` (of copies);
- ``policy`` (when to copy, and when to give up), ``report`` and ``metrics``.

What follows from a death is in ``journal`` (what is asked again) and ``replacer`` (what happens in turn).
"""

from cluster.recovery.policy import Recovery
from cluster.recovery.report import RecoveryReport

__all__ = ["Recovery", "RecoveryReport"]
