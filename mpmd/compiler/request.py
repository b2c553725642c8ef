"""A request to compile a step, with the specs and placements that the caller leaves open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import AbstractMesh

from mpmd.ir.placement import Placement
from mpmd.ir.plan import Spec
from mpmd.ir.stack import Stack

PartialSums = Literal["replicated", "all", "none"]
"""The accumulators that may hold partial sums over the devices of a group: see ``mpmd.jit``."""

Gather = Literal["task", "step"]
"""The time at which weights that are sharded over the batch's axes are gathered: see ``mpmd.jit``."""


@dataclasses.dataclass(frozen=True)
class SequenceParallel:
    """The sharding of residuals and norms between tensor-parallel regions.

    Attributes:
      tokens: for argument leaves, by position, the dimension that is divided between regions.
      rows: the same for the rows of the batch; empty if these are divided.
      outer_axis: the axis along which that dimension is divided anyway.
      axis: the axis of the regions, along which weights are sharded.
    """

    tokens: Mapping[int, int]
    rows: Mapping[int, int]
    outer_axis: str
    axis: str = "model"


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """A step, and how groups of devices are to run it.

    Attributes:
      fun: the step; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      submeshes: the shape of each group's submesh; all have the same axes.
      donated: for each argument leaf, whether the caller gives it up; none if none is.
      in_specs: for each argument leaf how it is sharded within a group; ``None`` for one, or for all:
        replicated.
      are_asked: for each argument leaf, whether the caller asks for its spec; else the passed array has the
        spec, which holds where it divides. ``None``: all are asked for.
      out_specs: returns the specs of result leaves, given the shape of the result; the compiler chooses where
        one is ``None``.
      partial_sums: which accumulators may hold partial sums over the devices of a group.
      gather: when weights that are sharded over the batch's axes are gathered.
      sequence_parallel: how values between tensor-parallel regions are sharded along the axis of the regions;
        ``None``: no pass shards them.
      argument_placements: for a function without a loop, where each argument leaf is; ``ANYWHERE`` for one
        that the caller sends. A leaf that groups hold in layer ranges is read in these ranges.
      result_placements: for a function without a loop, the placement that each result leaf is to have;
        ``ANYWHERE``: where it is computed. Their specs are in ``out_specs``.
      parts: the groups of each part of the mesh, by its name.
    """

    fun: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    submeshes: Sequence[AbstractMesh]
    donated: Sequence[bool] = ()
    in_specs: Sequence[Spec | None] | None = None
    are_asked: Sequence[bool] | None = None
    out_specs: Callable[[Any], Sequence[Spec | None]] | None = None
    partial_sums: PartialSums = "replicated"
    gather: Gather = "task"
    sequence_parallel: SequenceParallel | None = None
    argument_placements: Sequence[Placement] | None = None
    result_placements: Sequence[Placement] | None = None
    parts: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    @property
    def argument_stacks(self) -> tuple[Stack | None, ...]:
        return tuple(placement.stack for placement in self.argument_placements or ())

    @property
    def result_stacks(self) -> tuple[Stack | None, ...]:
        return tuple(placement.stack for placement in self.result_placements or ())
