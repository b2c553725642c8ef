"""Profiles a step: traces it with each layer as a stage, and sums up the layers in a table without JAX.

``tracing.py`` traces, by the compiler's own passes. Of what these say, ``ownership.py`` finds which
arguments are whose weights, ``microbatch.py`` the rows, ``classes.py`` which dimensions are one and the same,
and ``traffic.py`` how many bytes a task reads and writes. ``profile_step.py`` sums up, and
``open_step.py`` says what a step leaves open.
"""

from mpmd.planner.profiling.open_step import ProfiledStep, profile_of, profile_step

__all__ = ["ProfiledStep", "profile_of", "profile_step"]
