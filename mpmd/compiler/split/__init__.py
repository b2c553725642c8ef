"""The third pass: a ``CutStep`` enters, a ``TaskGraph`` leaves.

``split.py`` lists the phases, one line each. The other files are the phases, each named after its function;
``microbatch_order.py`` has the order of the work of one microbatch, which several phases need.
"""

from mpmd.compiler.split.split import split

__all__ = ["split"]
