"""The fifth pass: a ``ShardedGraph`` enters, a ``PlacedGraph`` leaves.

``place_stages.py`` says on which group each stage is, ``place.py`` on which groups each value outside of
loops is and each equation runs, such as those of an optimizer's update. When they run is said by
``early_updates.py``, before which loop, and ``exchanges.py``, after how many exchanges between groups.
``check_specs.py`` checks how the user wants values sharded, on the groups where they are now known to be.
"""

from mpmd.compiler.place.place import place

__all__ = ["place"]
