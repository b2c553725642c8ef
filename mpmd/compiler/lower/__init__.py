"""The sixth pass: a ``PlacedGraph`` enters, a ``Program`` leaves: the plan, and the functions of its
executables.

``lower.py`` writes the programs of the groups. ``cells.py`` lowers the cells of the schedule; ``fuse.py``
makes one list of equations of a cell's tasks. ``executables.py`` makes functions of equations, one for all
lists that are equal (``fingerprint.py``); ``group_meshes.py`` moves the equations to the submesh of their
group, and ``call.py`` has them call a jaxpr. ``liveness.py`` adds frees and donations to the plan.
"""

from mpmd.compiler.lower.lower import lower

__all__ = ["lower"]
