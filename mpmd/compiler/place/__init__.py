"""The fourth pass: a ``ShardedGraph`` enters, a ``PlacedGraph`` leaves.

``place.py`` says on which groups each value outside the loop is and each equation runs, ``exchanges.py`` how
many exchanges between groups come before each equation.
"""

from mpmd.compiler.place.place import place

__all__ = ["place"]
