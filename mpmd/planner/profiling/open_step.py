"""Profiles a step of which something may be open: its stages, its schedule, its number of microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpmd.compiler.graph import TaskGraph
from mpmd.decisions import Decisions
from mpmd.garbage import without_garbage_collection
from mpmd.planner.layers.stages_of import Stages, stages_of
from mpmd.planner.profile import Profile
from mpmd.planner.profiling.profile_step import profile_of_graph
from mpmd.planner.profiling.tracing import traced_layers


class ProfiledStep(NamedTuple):
    """What a search knows of a step, with the stages that it has as it is written, and what was traced.

    Each stage of the graph is a layer.
    """

    profile: Profile
    written: Stages
    graph: TaskGraph


@without_garbage_collection()
def profile_step(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> ProfiledStep:
    """What a search knows of ``step(*args, **kwargs)``.

    Args:
      step: a train step with a loop over microbatches; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.

    Raises: ``CompileError`` as ``mpmd.jit``, and for a step without a loop.
    """
    written = stages_of(step, args, kwargs)
    graph = traced_layers(step, args, kwargs, written)
    profile = dataclasses.replace(profile_of_graph(graph), are_stages=written.are_written)
    if _leaves_microbatches_open(step, args, kwargs, written, profile.rows):
        profile = dataclasses.replace(profile, num_microbatches=None)
    return ProfiledStep(profile, written, graph)


def profile_of(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Profile:
    """The profile of ``profile_step``."""
    return profile_step(step, args, kwargs).profile


def _leaves_microbatches_open(
    step: Callable, args: tuple, kwargs: Mapping[str, Any], written: Stages, rows: int
) -> bool:
    """Whether the loop has as many microbatches as is decided: it has one when nothing is."""
    if written.num_microbatches > 1 or rows == 1:
        return False
    number = next(factor for factor in range(2, rows + 1) if rows % factor == 0)
    decisions = Decisions(num_microbatches=number, layers_per_stage=())
    return stages_of(step, args, kwargs, decisions).num_microbatches == number
