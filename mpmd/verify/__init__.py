"""Proves of a plan, before it runs, that it can run. A ``Plan`` enters; what the plan needs leaves.

Start reading in ``verify.py``, which composes the proof. ``structure.py`` checks that the parts of the plan
fit together, ``lifetimes.py`` follows the values of one group, and ``channels.py`` follows the messages
between groups. ``docs/verification.md`` says what is proven, and under which assumptions.
"""

from mpmd.verify.verify import Verified, verify

__all__ = ["Verified", "verify"]
