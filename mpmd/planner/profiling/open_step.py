"""Profiles a step that may leave its stages, its schedule or its number of microbatches open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from mpmd.compiler.find_layers.stages_of import EACH_LAYER, Stages, stages_of
from mpmd.compiler.graph import TaskGraph
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.profiling.layered_step import LayeredStep, layered
from mpmd.planner.profiling.profile_step import loop_profiles
from mpmd.planner.profiling.tracing import traced_layers
from mpmd.planner.profiling.whole_step import whole_step
from mpmd.util.garbage import without_garbage_collection


class ProfiledStep(NamedTuple):
    """The profiles of a step's loops, the stages that its loops have as written, and the traced graph.

    A step without a loop has one profile, and ``written`` is empty. Each stage of the graph is a layer.
    """

    profiles: tuple[LayerProfile, ...]
    written: tuple[Stages, ...]
    graph: TaskGraph


@without_garbage_collection()
def profile_step(
    step: Callable, args: tuple, kwargs: Mapping[str, Any], num_layers: int | None = None
) -> ProfiledStep:
    """Profiles ``step(*args, **kwargs)``.

    Args:
      step: a train step with loops over microbatches, or without; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      num_layers: the number of layers of a step that leaves its stages open; ``None``: as many as are found.

    Raises: ``CompileError`` as ``mpmd.jit``.
    """
    each_layer = dataclasses.replace(EACH_LAYER, num_layers=num_layers)
    written = stages_of(step, args, kwargs, each_layer)
    graph = traced_layers(step, args, kwargs, written, each_layer)
    if not graph.step.loops:
        return ProfiledStep(loop_profiles(whole_step(graph)), (), graph)
    in_layers = layered(graph)
    rows = math.gcd(*(loop.rows for loop in in_layers.loops if loop.num_microbatches == 1))
    open_loops = _open_loops(step, args, kwargs, written, rows)
    profiles = loop_profiles(_with_open_loops(in_layers, open_loops))
    # Loops that no result needs are not in the graph.
    of_loop = {loop.decision_index: loop for loop in written}
    live = tuple(of_loop[loop.decision_index] for loop in graph.step.loops)
    return ProfiledStep(
        tuple(
            dataclasses.replace(profile, are_stages=loop.are_written, slices=loop.slices)
            for profile, loop in zip(profiles, live, strict=True)
        ),
        live,
        graph,
    )


def profile_of(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> LayerProfile:
    """The profile of a step with one loop, or none."""
    (profile,) = profile_step(step, args, kwargs).profiles
    return profile


def _with_open_loops(step: LayeredStep, open_loops: Container[int]) -> LayeredStep:
    loops = [dataclasses.replace(loop, is_open=loop.decision_index in open_loops) for loop in step.loops]
    return dataclasses.replace(step, loops=loops)


def _open_loops(
    step: Callable, args: tuple, kwargs: Mapping[str, Any], written: Sequence[Stages], rows: int
) -> frozenset[int]:
    """The loops that have as many microbatches as is decided, and one if nothing is.

    Args:
      rows: the greatest common divisor of the rows of all loops with one microbatch; 0 if there are none.
    """
    if rows < 2:  # no rows to cut, or no loop of one microbatch
        return frozenset()
    number = next(factor for factor in range(2, rows + 1) if rows % factor == 0)
    decisions = dataclasses.replace(EACH_LAYER, num_microbatches=number)
    decided = stages_of(step, args, kwargs, decisions)
    return frozenset(
        one.decision_index
        for one, other in zip(written, decided, strict=True)
        if one.num_microbatches == 1 and other.num_microbatches == number
    )
