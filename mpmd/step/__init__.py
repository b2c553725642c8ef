"""A step in each of its states, as its user holds it.

A function enters; results leave. Start reading in ``jit.py``: ``mpmd.jit`` returns a function that compiles
itself for each kind of call. ``lowered_step.py`` is the step with its plan, ``loaded_step.py`` the step on
its groups, ``step_results.py`` the arrays of its result. ``planned_step.py`` has the questions that the
plan alone answers, and ``initialize.py`` makes state where the step wants it.
"""
