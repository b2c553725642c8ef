"""Traces a step with each of its layers as a stage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, AxisType

from mpmd.compiler.cut_layers import MarkedStages, count_stages, cut_layers
from mpmd.compiler.find_layers.auto_marks import auto_marks
from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.equations import with_eqns
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.split import split
from mpmd.compiler.steps import Loop
from mpmd.compiler.trace import trace
from mpmd.language.decisions import Decisions, decided, planning
from mpmd.language.reduce import treduce_p
from mpmd.schedules import CustomSchedule, ForwardOnly, GPipe, Schedule

_ONE_DEVICE = AbstractMesh((1, 1, 1), ("data", "sequence", "model"), (AxisType.Auto,) * 3)
"""The mesh within which steps are traced, so that their specs may name the axes of any candidate."""


EACH_LAYER = Decisions(layers_per_stage=(), mark_layers=auto_marks)


class WrittenLoop(NamedTuple):
    """A loop as the user wrote it: its schedule, ``None`` if that is open, and the stages of its marks."""

    schedule: Schedule | None
    stages: MarkedStages
    has_open_number: bool


class TracedLayers(NamedTuple):
    """A step in which each layer, or each stage that the user marked, is a stage.

    Attributes:
      graph: its tasks.
      written: its loops by their decision indices.
    """

    graph: TaskGraph
    written: Mapping[int, WrittenLoop]


def traced_layers(
    step: Callable, args: tuple, kwargs: Mapping[str, Any], each_layer: Decisions = EACH_LAYER
) -> TracedLayers:
    """Traces a step for the tasks of its layers. Raises ``CompileError`` as ``mpmd.jit``."""
    cuts: set[int] = set()
    with planning():
        traced = trace(CompileRequest(decided(step, each_layer, slices=cuts), args, kwargs, [_ONE_DEVICE]))
    written: dict[int, WrittenLoop] = {}
    eqns: list[JaxprEqn] = []
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive is treduce_p:
            loop, schedule = Loop.of(eqn), eqn.params["schedule"]
            is_open = loop.num_microbatches == 1 and loop.decision_index in traced.open_loops
            stages = count_stages(loop, schedule, cuts)
            written[loop.decision_index] = WrittenLoop(schedule, stages, is_open)
            in_layers = _in_layers(schedule, stages.count, loop.num_microbatches)
            eqn = eqn.replace(params={**eqn.params, "schedule": in_layers})
        eqns.append(eqn)
    with_schedules = dataclasses.replace(traced, jaxpr=with_eqns(traced.jaxpr, eqns))
    return TracedLayers(split(cut_layers(with_schedules)), written)


def _in_layers(written: Schedule | None, num_layers: int, num_microbatches: int) -> Schedule:
    """A schedule of the layers. The order of its tasks does not matter, but halves of backwards would."""
    order = GPipe if written is None or _has_backwards(written, num_microbatches) else ForwardOnly
    return order.of_size(num_layers, num_layers)


def _has_backwards(schedule: Schedule, num_microbatches: int) -> bool:
    if isinstance(schedule, CustomSchedule):
        num_microbatches = schedule.num_microbatches
    cells = itertools.chain.from_iterable(schedule.tasks(num_microbatches))
    return any(task.kind != "fwd" for cell in cells for task in cell.tasks)
