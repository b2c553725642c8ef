"""What is decided for a step from outside, where the step itself leaves it open.

A step that says neither its schedule nor where its stages end is traced under ``Decisions``, which
``mpmd.treduce``, ``mpmd.value_and_grad``, ``mpmd.microbatches`` and ``mpmd.auto_marks`` read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What a plan has decided; ``None`` leaves it to the step.

    Attributes:
      schedule: takes the place of the schedule of the step's ``treduce``.
      num_microbatches: for what is called without a number of microbatches.
      layers_per_stage: how many layers of a function under ``mpmd.auto_marks`` each stage has. ``()``: each
        layer is a stage.
      remat: whether each of these layers is computed again in the backward, from what enters it.
    """

    schedule: Schedule | None = None
    num_microbatches: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    remat: bool = False


# The context is part of the keys of JAX's caches: what a step jits is traced anew for other decisions.
_decisions = jax.make_user_context(default_value=Decisions())


def current_decisions() -> Decisions:
    """What has been decided for the step that is being traced."""
    return _decisions.value


def decided(fun: Callable, decisions: Decisions) -> Callable:
    """The function, traced under decisions."""

    @functools.wraps(fun)
    def under_decisions(*args, **kwargs):
        with _decisions(decisions):
            return fun(*args, **kwargs)

    return under_decisions
