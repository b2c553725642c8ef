"""Proves that a plan can run, before it runs. A ``Plan`` enters; ``Verified`` leaves.

Start reading in ``verify.py``, which composes the proof. ``structure.py`` checks that the parts of the plan
fit together, ``lifetimes.py`` follows the values of one group, and ``channels.py`` follows the messages
between groups. ``docs/verification.md`` lists the proven properties, and the assumptions.
"""

from mpmd.verify.verify import Verified, verify

__all__ = ["Verified", "verify"]
