"""The fifth pass: a ``ShardedGraph`` enters, a ``PlacedGraph`` leaves.

``place_stages.py`` says on which group each stage is, ``place.py`` on which groups each value outside of
loops is and each equation runs, ``exchanges.py`` how many exchanges between groups come before each equation.
``check_specs.py`` checks how the user wants values sharded, on the groups where they are now known to be.
"""

from mpmd.compiler.place.check_specs import check_specs
from mpmd.compiler.place.place import place

__all__ = ["check_specs", "place"]
