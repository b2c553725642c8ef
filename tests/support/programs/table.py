"""What an entry of the table of programs is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import pytest

import mpmd
from mpmd.step.loaded_step import LoadedStep
from tests.support.models import SGD, batch, descend, init, make_step, mse, weights


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step, what it is called with, and what has to hold of it.

    Attributes:
      step: ``state, *batch`` to ``state, result``, ordinary JAX.
      groups: of devices; ``axes`` are those of a group's submesh.
      options: for ``mpmd.jit``.
      tolerance: the largest difference there may be between two floats.
      steps: how many are run, each with the state of the one before.
      holds: asserts what the plan of the loaded step is to be like.
      warns: what the ``StepWarning`` of compiling it says, as a pattern; ``None``: there is none.
    """

    step: Callable[..., tuple[Any, Any]]
    state: Any
    batch: tuple
    groups: int = 3
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 2e-5
    steps: int = 2
    holds: Callable[[LoadedStep], None] | None = None
    warns: str | None = None

    def warned(self) -> contextlib.AbstractContextManager[Any]:
        """Asserts that the warning is given within."""
        if self.warns is None:
            return contextlib.nullcontext()
        return pytest.warns(mpmd.StepWarning, match=self.warns)


@dataclasses.dataclass(frozen=True)
class Program:
    """An entry of the table; ``case`` makes the case when its test runs."""

    name: str
    case: Callable[[], Case]


def program(variants: Any = None) -> Callable[[Callable[..., Case]], tuple[Program, ...]]:
    """Makes entries of a function that returns a case: one, or one for each of the variants.

    Args:
      variants: the argument of each call of the function, by the variant's name; or names alone.
    """

    def entries(function: Callable[..., Case]) -> tuple[Program, ...]:
        name = function.__name__
        if variants is None:
            return (Program(name, function),)
        arguments = variants if isinstance(variants, Mapping) else {str(v): v for v in variants}
        return tuple(
            Program(f"{name}[{variant}]", partial(function, argument))
            for variant, argument in arguments.items()
        )

    return entries


def entries_of(module: ModuleType) -> list[Program]:
    """The entries a module defines, in order."""
    return [
        entry
        for value in vars(module).values()
        if isinstance(value, tuple)
        for entry in value
        if isinstance(entry, Program)
    ]


def train(
    loss: Callable[..., Any],
    params: Any,
    stages: int = 3,
    *,
    optimizer: Any = SGD,
    schedule: mpmd.Schedule | None = None,
    operation: Any = mpmd.Add,
    data: tuple | None = None,
    **of_case: Any,
) -> Case:
    """Trains ``params`` to lower ``loss(params, x, y)``, summed over microbatches.

    The state is ``params, optimizer state``, the result ``loss, gradients``.
    """
    schedule = schedule or mpmd.Std1F1B(stages)
    step = make_step(loss, schedule, optimizer, operation)
    return Case(step, init(params, optimizer), data or batch(), schedule.mpmd_dim, **of_case)


def stages_of(stage: Callable[..., Any]) -> Case:
    """Trains a model of three stages, each of which is ``stage(p, h)`` of its parameters."""
    return train(partial(mse, layer=stage), weights(3))


def loop(fun: Callable[..., Any], data: Any, stages: int = 3, operation: Any = mpmd.Add) -> Any:
    """``treduce`` under 1F1B, for steps that differ in what they do outside of it."""
    return mpmd.treduce(lambda mb: fun(*mb), data, schedule=mpmd.Std1F1B(stages), operation=operation)


def trains(params: Any, data: Any, loss: Callable[..., Any] = mse, stages: int = 3) -> Any:
    """The loss and gradients of ``params``, added up over the microbatches of ``data``."""
    return loop(lambda *mb: jax.value_and_grad(loss)(params, *mb), data, stages)


def by_index(loss: Callable[..., Any], schedule: mpmd.Schedule | None = None) -> Callable[..., Any]:
    """A step of ``loss(params, i, xs, ys)`` of a microbatch's index, by default of two stages under 1F1B."""

    def step(state: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        total, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(state, i, xs, ys),
            len(xs),
            schedule or mpmd.Std1F1B(2),
            mpmd.Add,
        )
        return descend(state, grads), total

    return step
