"""Traces a step with each of its layers as a stage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpmd.compiler.cut_layers import cut_layers
from mpmd.compiler.find_layers.stages_of import EACH_LAYER, ONE_DEVICE, Stages
from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.split import split
from mpmd.compiler.trace import trace
from mpmd.language.decisions import Decisions, decided, in_order
from mpmd.schedules import ForwardOnly, GPipe


def traced_layers(
    step: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    loops: Sequence[Stages],
    each_layer: Decisions = EACH_LAYER,
) -> TaskGraph:
    """The tasks of a step in which each layer, or each stage that the user marked, is a stage.

    It is traced within a mesh of one device with an axis for each kind of division, which specs in the step
    may name.

    Args:
      loops: as ``stages_of`` finds them, under the same decisions.
      each_layer: has each layer be a stage.

    Raises: ``CompileError`` as ``mpmd.jit``.
    """
    of_loops = {loop.decision_index: _decisions(loop, each_layer) for loop in loops}
    decisions = dataclasses.replace(each_layer, of_loops=in_order(of_loops)) if loops else Decisions()
    request = CompileRequest(decided(step, decisions), args, kwargs, [ONE_DEVICE])
    return split(cut_layers(trace(request)))


def _decisions(loop: Stages, each_layer: Decisions) -> Decisions:
    """The decisions for a loop. The order of its tasks does not matter, but halves of backwards would."""
    order = ForwardOnly if _is_forward_only(loop) else GPipe
    return dataclasses.replace(each_layer, schedule=order.of_size(loop.count, loop.count))


def _is_forward_only(stages: Stages) -> bool:
    """Whether the schedule has no backwards; an open one is assumed to have some."""
    if stages.schedule is None:
        return False
    cells = itertools.chain.from_iterable(stages.schedule.tasks(stages.num_microbatches))
    return all(task.kind == "fwd" for cell in cells for task in cell.tasks)
