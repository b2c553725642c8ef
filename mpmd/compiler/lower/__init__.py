"""The sixth pass: a ``PlacedGraph`` enters, a ``Program`` leaves, which has the plan.

``lower.py`` writes the programs of the groups. ``cells.py`` lowers the cells of the schedule; ``fuse.py``
makes one list of equations of a cell's tasks. ``executables.py`` makes functions of equations, one for all
lists that are equal (``fingerprint.py``). ``liveness.py`` adds frees and donations to the plan.
"""

from mpmd.compiler.lower.lower import lower

__all__ = ["lower"]
