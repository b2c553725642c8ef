"""Draws schedules and steps: as text, as pictures, and as traces for Perfetto.

What is simulated and what is measured look alike, so that the two can be compared.
"""

from mpmd.render.comparison import draw_comparison
from mpmd.render.grid import schedule_grid
from mpmd.render.timeline import draw_timeline
from mpmd.render.trace import chrome_trace

__all__ = ["chrome_trace", "draw_comparison", "draw_timeline", "schedule_grid"]
