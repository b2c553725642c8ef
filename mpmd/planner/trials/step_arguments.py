"""Facts about a step's arguments that decide how they are sharded, as which state is of which weight."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping

from jax.extend.core import Var

from mpmd.compiler.jaxprs.elementwise import elementwise_classes
from mpmd.compiler.jaxprs.equations import free_variables
from mpmd.compiler.steps import CutStep


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """The leaves of a step's arguments, by their positions.

    Attributes:
      shapes: the shape of each leaf.
      updated: the leaves that the step returns updated.
      weights: the updated leaves that loops read; without a loop, all updated leaves. In a step that updates
        nothing, all leaves that are read, including the batch.
      linked: for each leaf, the leaves with which it is combined element by element, including itself: a
        weight and the optimizer's state for it.
      stacked: the dimension of a leaf that counts layers and is cut between stages.
    """

    shapes: tuple[tuple[int, ...], ...]
    updated: frozenset[int]
    weights: frozenset[int]
    linked: tuple[frozenset[int], ...]
    stacked: Mapping[int, int]


def step_arguments(step: CutStep) -> StepArguments:
    leaves = step.argument_leaves
    leaf_of = [position for position, leaf in enumerate(leaves) for _ in leaf.names]
    variables = [argument.var for argument in step.arguments]
    outside = tuple(itertools.chain(*step.outside))
    classes = elementwise_classes(outside)
    members: dict[Var, set[int]] = collections.defaultdict(set)
    for position, var in zip(leaf_of, variables, strict=True):
        members[classes.get(var, var)].add(position)
    linked: list[set[int]] = [{position} for position in range(len(leaves))]
    for together in members.values():
        for position in together:
            linked[position] |= together
    updated = frozenset(argument for argument, _ in step.fed_back_leaves)
    everything = frozenset(range(len(leaves)))
    read = _read_by_loop(step)
    used = {leaf_of[i] for i, var in enumerate(variables) if var in read} if step.loops else everything
    weights = used & (updated or everything)
    return StepArguments(
        shapes=tuple(leaf.shape for leaf in leaves),
        updated=updated,
        weights=frozenset(weights),
        linked=tuple(map(frozenset, linked)),
        stacked={i: leaf.stack.axis for i, leaf in enumerate(leaves) if leaf.stack is not None},
    )


def _read_by_loop(step: CutStep) -> set[Var]:
    """The variables that loops read, and the variables from which equations before the loops compute them."""
    read: set[Var] = {var for loop in step.loops for var in free_variables(loop.eqns)}
    for eqn in reversed(tuple(itertools.chain(*step.outside[:-1]))):
        if not read.isdisjoint(eqn.outvars):
            read.update(free_variables([eqn]))
    return read
