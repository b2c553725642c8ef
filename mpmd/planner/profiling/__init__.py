"""Profiles a step: traces it with each layer as a stage, and sums up its layers in a table without JAX.

``tracing.py`` traces, by the compiler's own passes. From their results ``ownership.py`` assigns arguments to
layers, ``microbatch.py`` finds the rows, ``classes.py`` the dimensions that are one and the same, and
``task_work.py`` counts the operations of a task, and the bytes that it reads and writes. ``profile_step.py``
sums up, and ``open_step.py`` finds the decisions that a step leaves open.
"""

from mpmd.planner.profiling.open_step import ProfiledStep, profile_of, profile_step

__all__ = ["ProfiledStep", "profile_of", "profile_step"]
