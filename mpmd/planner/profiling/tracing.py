"""Traces a step with each of its layers as a stage, which gives what a plan knows of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.split import split
from mpmd.compiler.trace import trace
from mpmd.decisions import Decisions, decided
from mpmd.planner.layers.stages_of import ONE_DEVICE, Stages
from mpmd.schedules import ForwardOnly, GPipe


def traced_layers(step: Callable, args: tuple, kwargs: Mapping[str, Any], stages: Stages) -> TaskGraph:
    """The tasks of a step in which each layer, or each stage that the user marked, is a stage.

    It is traced within a mesh of one device with an axis for each kind of division, which specs in the step
    may name.

    Args:
      stages: as ``stages_of`` finds them.

    Raises: ``CompileError`` as ``mpmd.jit``.
    """
    # The order of the tasks does not matter here, and halves of backwards would be tasks of their own.
    order = ForwardOnly if _is_forward_only(stages) else GPipe
    decisions = Decisions(schedule=order.of_size(stages.count, stages.count), layers_per_stage=())
    return split(trace(decided(step, decisions), args, dict(kwargs), [ONE_DEVICE]))


def _is_forward_only(stages: Stages) -> bool:
    """Whether the schedule has no backwards; one that is open is taken to have some."""
    if stages.schedule is None:
        return False
    cells = itertools.chain.from_iterable(stages.schedule.tasks(stages.num_microbatches))
    return all(task.kind == "fwd" for cell in cells for task in cell.tasks)
