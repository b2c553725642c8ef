"""A phase of ``trace`` that cuts scans over layers, and with them the arrays that they scan over.

``cut_stacks`` in ``cut.py`` is where to start reading. ``link.py`` goes through the step once and notes, by
the rules in ``jaxprs/axes.py`` and ``assemblies.py``, which dimensions of its values are the same;
``dimensions.py`` has what follows: which of them count layers, and where they are cut. ``rewrite.py`` goes
through it again and writes an equation for each part, or, where no rule applies, one of the whole;
``scans.py`` is the rule for scans, which ``marked_scans.py`` reads, and ``values.py`` has the values in
parts. ``scans_over_data.py`` warns of marks in scans that are none over layers. What comes behind knows
nothing of stacks.
"""

from mpmd.compiler.cut_layers.cut import CutStep, cut_stacks, has_marked_scan
from mpmd.compiler.cut_layers.inline import in_loops, with_calls_open, with_marks_open, with_own_variables
from mpmd.compiler.cut_layers.marked_scans import iterations_of, marks_in, without_marks

__all__ = [
    "CutStep",
    "cut_stacks",
    "has_marked_scan",
    "in_loops",
    "iterations_of",
    "marks_in",
    "with_calls_open",
    "with_marks_open",
    "with_own_variables",
    "without_marks",
]
