"""Traces a step with each of its layers as a stage, which gives what a plan knows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.split import split
from mpmd.compiler.trace import trace
from mpmd.decisions import Decisions, decided
from mpmd.schedules import GPipe

_AXES = ("data", "model", "sequence")


def traced_layers(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> TaskGraph:
    """The tasks of a step in which each layer, or each stage that the user marked, is a stage.

    It is traced within a mesh of one device with an axis for each kind of division, which specs in the step
    may name.

    Raises: ``CompileError`` as ``mpmd.jit``; ``ValueError`` for a step without a ``treduce`` loop.
    """
    mesh = AbstractMesh((1,) * len(_AXES), _AXES, (AxisType.Auto,) * len(_AXES))
    traced = trace(decided(step, Decisions(layers_per_stage=())), args, dict(kwargs), [mesh])
    loop = traced.loop
    if loop is None:
        raise ValueError(
            "a plan is for a step with a loop over microbatches: call mpmd.treduce, or mpmd.value_and_grad, "
            "in it"
        )
    # The order of the tasks does not matter here, and halves of backwards would be tasks of their own.
    has_backward = any(
        task.kind != "fwd"
        for cells in loop.schedule.tasks(loop.num_microbatches)
        for cell in cells
        for task in cell.tasks
    )
    if has_backward:
        loop = dataclasses.replace(loop, schedule=GPipe(loop.schedule.num_stages))
    return split(dataclasses.replace(traced, loop=loop))
