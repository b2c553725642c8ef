"""The numbers of a function's steps, as users plot them.

Ended steps enter from a ``mpmd.runtime.step_meter.StepMeter``; a dict for each step, or for every ten, leaves
to the user's ``write``. Start reading in ``metrics.py``, the only file. Ray has ``cluster/metrics.py``.
"""
