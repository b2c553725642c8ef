"""Watching a run: the numbers of its steps, as users plot them.

Ended steps enter from a ``mpmd.runtime.step_meter.StepMeter``; a dict for each step, or for every so many,
leaves to the user's ``write``. Start reading in ``metrics.py``, which is all there is. ``mpmd top``, which
shows a run that another terminal has started, is in ``cluster/watching/`` and ``mpmd/cli/top.py``.
"""
