"""Cuts scans with marks where stages end, as a loop's function calls them.

While ``mpmd`` traces the function of a ``treduce``, binding a scan with marks in its body binds the scans of
its ranges instead (``marked_scans.py``), before anything is differentiated, batched or put under
``jax.checkpoint``. So it makes no difference who differentiates. ``cut_scan.py`` does the cutting, for the
user's marks and for marks by ``mpmd.auto_marks``; ``layer_ranges.py`` notes on arrays where they are cut, for
``cut_layers``; and ``index_loops.py`` refuses loops that take rows by a counter.
"""

from mpmd.compiler.cut_scans.cut_scan import cut_scan
from mpmd.compiler.cut_scans.index_loops import check_index_loops
from mpmd.compiler.cut_scans.layer_ranges import MarkedScan, layers_p
from mpmd.compiler.cut_scans.marked_scans import AS_PYTHON_LOOP, cut_marked_scan, iterations_of

__all__ = [
    "AS_PYTHON_LOOP",
    "MarkedScan",
    "check_index_loops",
    "cut_marked_scan",
    "cut_scan",
    "iterations_of",
    "layers_p",
]
