"""The second pass: a ``TracedStep`` enters, a ``CutStep`` leaves.

``cut_layers.py`` lists the phases: the arrays that scans over layers read are cut where the scans are, and
so are arrays with the same layer dimension, such as gradients; callbacks are taken out of scans
(``host_callbacks.py``); equations that no result needs are removed; and marks get the numbers of their
stages, before and after this removal (``number_marks.py``).

``cut_stacks`` in ``cut.py`` is where to start reading of the first phase. ``dimension_graph.py`` goes
through the step once and notes, by the rules in ``jaxprs/rules.py`` and ``concat_and_slice.py``, which
dimensions of its values are the same; ``layer_dimensions.py`` concludes which dimensions count layers, and
where these are cut. ``rewrite.py`` goes through the step again and writes an equation for each layer range,
or, where no rule applies, one equation for the whole value; ``values.py`` has the values in layer ranges.
``scans_over_data.py`` warns of marks in scans that are not over layers. The passes that follow know nothing
of stacks.
"""

from mpmd.compiler.cut_layers.cut_layers import cut_layers
from mpmd.compiler.cut_layers.number_marks import MarkedStages, count_stages

__all__ = ["MarkedStages", "count_stages", "cut_layers"]
