"""The second pass: a ``TracedStep`` enters, a ``CutStep`` leaves.

``cut_layers.py`` lists the phases: scans over layers are cut at their marks, and with them the arrays that
they scan over; callbacks are taken out of scans (``host_callbacks.py``); marks get the numbers of their
stages (``number_marks.py``); equations that nothing needs are removed (``dead_code.py``).

``cut_stacks`` in ``cut.py`` is where to start reading of the first phase. ``dimension_graph.py`` goes through
the step once and notes, by the rules in ``jaxprs/rules.py`` and ``concat_and_slice.py``, which dimensions of
its values are the same; ``dimensions.py`` has what follows: which of them count layers, and where they are
cut. ``rewrite.py`` goes through it again and writes an equation for each part, or, where no rule applies, one
of the whole; ``scans.py`` is the rule for scans, which ``marked_scans.py`` reads, and ``values.py`` has the
values in parts. ``scans_over_data.py`` warns of marks in scans that are none over layers. The passes that
follow know nothing of stacks.
"""

from mpmd.compiler.cut_layers.cut_layers import cut_layers
from mpmd.compiler.cut_layers.marked_scans import iterations_of

__all__ = ["cut_layers", "iterations_of"]
