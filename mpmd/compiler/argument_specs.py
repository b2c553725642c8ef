"""Resolves how a step's arguments and results are sharded, and where the caller has or wants them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.equations import shape_of
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.steps import Argument, CutStep
from mpmd.ir.placement import ANYWHERE, Placement
from mpmd.ir.plan import Spec
from mpmd.ir.specs import indivisible
from mpmd.ir.stack import Leaf, per_layer_range


@dataclasses.dataclass(frozen=True)
class ArgumentSpecs:
    """The shardings of arguments and results within groups, and their placements.

    Attributes:
      leaves: for each leaf of the arguments, the spec that it has in whichever layer ranges; ``None`` for
        one, or for all: replicated.
      arguments: for each argument.
      results: for each result; ``None`` for one that is left to the compiler.
      others_are_open: whether the groups' compilers choose the specs of values that no pass knows;
        otherwise these are replicated.
      held: where each argument is before the step; ``ANYWHERE``: the caller sends it.
      wanted: where each result is to be after the step; ``ANYWHERE``: where it is computed. With a loop,
        whose stages say where everything is, all placements are ``ANYWHERE``.
    """

    leaves: tuple[Spec | None, ...] | None
    arguments: tuple[Spec, ...]
    results: tuple[Spec | None, ...]
    others_are_open: bool
    held: tuple[Placement, ...]
    wanted: tuple[Placement, ...]


def resolve(request: CompileRequest, step: CutStep) -> ArgumentSpecs:
    """Resolves the specs and placements that a request has for a step.

    The spec of a passed array holds where it divides all layer ranges of the array: on all groups, or
    without a loop, on the groups that hold them. A spec that the caller asks for always holds, and is refused
    by the pass ``place`` where it does not divide. Without a loop, another argument is replicated if groups
    hold it, and else has the spec with which it is returned.

    Raises: as ``request.out_specs``.
    """
    held = _of_ranges(step, step.argument_leaves, request.argument_placements)
    out_specs = request.out_specs(step.out_shape) if request.out_specs else None
    results = per_layer_range(step.result_leaves, out_specs or [None] * len(step.result_leaves))
    returned = {} if step.loops else dict(zip((r.var for r in step.results), results, strict=True))
    in_specs = request.in_specs or [None] * len(step.argument_leaves)
    are_asked = request.are_asked or [True] * len(in_specs)
    places = zip(step.arguments, held, strict=True)
    leaves: list[Spec | None] = []
    arguments: list[Spec] = []
    for leaf, spec, is_asked in zip(step.argument_leaves, in_specs, are_asked, strict=True):
        ranges = list(itertools.islice(places, len(leaf.names)))
        fits = [is_asked or _fits(spec or (), *each, request.submeshes) for each in ranges]
        leaves.append(spec if all(fits) else None)
        for (argument, there), fits_range in zip(ranges, fits, strict=True):
            if spec is not None and (fits_range if not step.loops else all(fits)):
                arguments.append(spec)
            else:
                arguments.append(() if there.mpmd_idxs else returned.get(argument.var) or ())
    are_known = request.in_specs is not None and (any(leaves) or leaves == list(in_specs))
    are_known_outside = are_known or any(arguments) or out_specs is not None
    return ArgumentSpecs(
        leaves=tuple(leaves) if are_known else None,
        arguments=tuple(arguments),
        results=tuple(results),
        others_are_open=are_known_outside or any(step.explicit_specs.values()),
        held=held,
        wanted=_of_ranges(step, step.result_leaves, request.result_placements),
    )


def _of_ranges(
    step: CutStep, leaves: Sequence[Leaf], placements: Sequence[Placement] | None
) -> tuple[Placement, ...]:
    """The placement of each layer range of leaves; ``ANYWHERE`` for leaves that are held in other ranges."""
    of_ranges: list[Placement] = []
    asked = [ANYWHERE] * len(leaves) if step.loops or placements is None else placements
    for leaf, placement in zip(leaves, asked, strict=True):
        there = placement if placement.stack == leaf.stack else ANYWHERE
        of_ranges += there.ranges if there.stack else [there] * len(leaf.names)
    return tuple(of_ranges)


def _fits(spec: Spec, argument: Argument, there: Placement, submeshes: Sequence[AbstractMesh]) -> bool:
    groups = [submeshes[group] for group in there.mpmd_idxs] or submeshes
    return not any(any(indivisible(spec, shape_of(argument.var), submesh.shape)) for submesh in groups)
