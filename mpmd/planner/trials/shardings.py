"""The shardings of a step's arguments under a candidate: state of the optimizer has the spec of its weight.

State belongs to a weight if it has the weight's shape and the step combines both element by element
(``step_arguments.py``). A spec of the user overrides the spec of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpmd.ir.plan import Spec
from mpmd.planner.candidate import Candidate
from mpmd.planner.layer_profile import Kind
from mpmd.planner.submesh import INNERMOST_FIRST
from mpmd.planner.trials.step_arguments import StepArguments

AXES: tuple[Kind, ...] = tuple(reversed(INNERMOST_FIRST))
"""The axes of every group's submesh, the outermost first."""


def argument_specs(
    arguments: StepArguments,
    divided: Mapping[Kind, Mapping[int, int]],
    candidate: Candidate,
    fixed: Sequence[Spec | None],
) -> list[Spec]:
    """The spec of each leaf of the arguments. State of the optimizer is sharded like its weight.

    Args:
      divided: for each kind, the divided dimension of a leaf, by the leaf's position.
      fixed: the user's spec of each leaf; ``None`` for an open one.
    """
    sizes: dict[str, int] = {
        axis: math.lcm(*(submesh[axis] for submesh in candidate.submeshes)) for axis in AXES
    }
    specs: dict[int, Spec] = {i: spec for i, spec in enumerate(fixed) if spec is not None}
    for leaf, shape in enumerate(arguments.shapes):
        if leaf in specs:
            continue
        like = [other for other in sorted(arguments.linked[leaf]) if arguments.shapes[other] == shape]
        of_like = [fixed[other] for other in like if fixed[other] is not None]
        if of_like:
            specs[leaf] = of_like[0] or ()
            continue
        entries: list[list[str]] = [[] for _ in shape]
        for axis in AXES:
            dims = [divided[axis][other] for other in (leaf, *like) if other in divided.get(axis, {})]
            if dims and sizes[axis] > 1:
                _divide(entries, shape, dims[0], axis, sizes)
        is_weight = not arguments.weights.isdisjoint(like) and leaf in (arguments.updated or like)
        if candidate.fsdp and is_weight and sizes["data"] > 1 and not any("data" in e for e in entries):
            _divide_some(entries, shape, arguments.stacked.get(leaf), sizes)
        specs[leaf] = _as_spec(entries)
    return [specs[leaf] for leaf in range(len(arguments.shapes))]


def _divide(
    entries: list[list[str]], shape: Sequence[int], dimension: int, axis: str, sizes: Mapping[str, int]
) -> bool:
    """Shards a dimension along an axis, if it divides on all groups; returns whether it does."""
    parts = math.prod(sizes[other] for other in (*entries[dimension], axis))
    if shape[dimension] % parts:
        return False
    entries[dimension].append(axis)
    return True


def _divide_some(
    entries: list[list[str]], shape: Sequence[int], stacked: int | None, sizes: Mapping[str, int]
) -> None:
    """Shards the largest dimension that divides along ``data``, rather one that nothing shards yet.

    Vectors stay whole: to gather one takes the latency of a matrix, and they hardly take memory.
    """
    free = [d for d in range(len(shape)) if d != stacked]
    if len(free) < 2:
        return
    for dimension in sorted(free, key=lambda d: (bool(entries[d]), -shape[d])):
        if _divide(entries, shape, dimension, "data", sizes):
            return


def _as_spec(entries: list[list[str]]) -> Spec:
    spec = [(tuple(entry) if len(entry) > 1 else entry[0]) if entry else None for entry in entries]
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)
