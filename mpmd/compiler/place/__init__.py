"""The third pass: a ``TaskGraph`` enters, a ``PlacedGraph`` leaves.

``place.py`` says on which groups each value outside the loop is and each equation runs, ``exchanges.py`` how
many exchanges between groups come before each equation, and ``infer_specs.py`` how values are sharded within
a group. ``check_specs.py`` checks what the user wants sharded, where it is now known to be.
"""

from mpmd.compiler.place.check_specs import check_specs
from mpmd.compiler.place.place import place

__all__ = ["check_specs", "place"]
