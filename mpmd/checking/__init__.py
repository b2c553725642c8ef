"""Compares a step on groups with the same step in plain JAX, leaf by leaf.

A step, a reference and arguments enter; a ``Check`` leaves, which prints as a table. Start reading in
``check.py``, which runs both; ``perturb.py`` says how far rounding can move the reference, and ``judge.py``
decides for each leaf.
"""

from mpmd.checking.check import check
from mpmd.checking.judge import Check, LeafCheck

__all__ = ["Check", "LeafCheck", "check"]
