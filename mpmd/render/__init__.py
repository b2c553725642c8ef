"""Draws schedules and steps as text, as pictures, and as traces for Perfetto.

A ``Simulation`` or measured ``Event``s enter; text, a file or a trace leaves. Both look alike, so that they
can be compared. Start reading in ``chart.py``, the data that all drawings show; ``timeline.py`` and
``comparison.py`` lay out the pictures, of which ``lanes.py``, ``legend.py`` and ``style.py`` draw the parts.
"""

from mpmd.render.comparison import draw_comparison
from mpmd.render.grid import schedule_grid
from mpmd.render.timeline import draw_timeline
from mpmd.render.trace import chrome_trace

__all__ = ["chrome_trace", "draw_comparison", "draw_timeline", "schedule_grid"]
