"""Profiles a step that may leave its stages, its schedule or its number of microbatches open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpmd.compiler.graph import TaskGraph
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.profiling.layered_step import layered
from mpmd.planner.profiling.profile_step import loop_profiles
from mpmd.planner.profiling.tracing import EACH_LAYER, WrittenLoop, traced_layers
from mpmd.planner.profiling.whole_step import whole_step


class ProfiledStep(NamedTuple):
    """The profiles of a step's loops, its loops as they are written, and the traced graph.

    A step without a loop has one profile, and ``written`` is empty. Each stage of the graph is a layer.
    """

    profiles: tuple[LayerProfile, ...]
    written: tuple[WrittenLoop, ...]
    graph: TaskGraph


def profile_step(
    step: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    num_layers: int | None = None,
    flash_attention: bool = False,
) -> ProfiledStep:
    """Profiles ``step(*args, **kwargs)``.

    Args:
      step: a train step with loops over microbatches, or without; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      num_layers: the number of layers of a step that leaves its stages open; ``None``: as many as are found.
      flash_attention: whether ``jax.nn.dot_product_attention`` is a kernel.

    Raises: ``CompileError`` as ``mpmd.jit``.
    """
    each_layer = dataclasses.replace(EACH_LAYER, num_layers=num_layers)
    graph, written = traced_layers(step, args, kwargs, each_layer)
    if not graph.step.loops:
        return ProfiledStep(loop_profiles(whole_step(graph, flash_attention)), (), graph)
    in_layers = layered(graph, flash_attention)
    can_be_cut = math.gcd(*(loop.rows for loop in in_layers.loops if loop.num_microbatches == 1)) > 1
    loops = [
        dataclasses.replace(loop, is_open=can_be_cut and written[loop.decision_index].has_open_number)
        for loop in in_layers.loops
    ]
    profiles = loop_profiles(dataclasses.replace(in_layers, loops=loops))
    # Loops that no result needs are not in the graph.
    live = tuple(written[loop.decision_index] for loop in graph.step.loops)
    return ProfiledStep(
        tuple(
            dataclasses.replace(profile, are_stages=loop.stages.are_written, slices=loop.stages.slices)
            for profile, loop in zip(profiles, live, strict=True)
        ),
        live,
        graph,
    )


def profile_of(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> LayerProfile:
    (profile,) = profile_step(step, args, kwargs).profiles
    return profile
