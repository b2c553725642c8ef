"""The fifth pass: a ``ShardedGraph`` enters, a ``PlacedGraph`` leaves.

``place_stages.py`` chooses the group of each stage; ``place.py`` chooses, outside of loops, the groups that
hold each value and run each equation, such as an optimizer's update. When these equations run is decided by
``early_updates.py`` (before which loop) and ``exchanges.py`` (after how many exchanges between groups).
``check_specs.py`` checks the user's specs against the submeshes of the groups that hold the values.
"""

from mpmd.compiler.place.place import place

__all__ = ["place"]
