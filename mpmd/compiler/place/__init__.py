"""The fourth pass: a ``ShardedGraph`` enters, a ``PlacedGraph`` leaves.

``place.py`` says on which groups each value outside the loop is and each equation runs, ``exchanges.py`` how
many exchanges between groups come before each equation. ``check_specs.py`` checks how the user wants values
sharded, on the groups where they are now known to be.
"""

from mpmd.compiler.place.check_specs import check_specs
from mpmd.compiler.place.place import place

__all__ = ["check_specs", "place"]
