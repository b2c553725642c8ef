"""Decisions that a step leaves open, and that are made from outside.

A step that says neither its schedule nor where its stages end is traced under ``Decisions``, which
``mpmd.treduce``, ``mpmd.value_and_grad``, ``mpmd.microbatches`` and ``mpmd.auto_marks`` read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import jax

from mpmd.language.remat import Remat
from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The decisions of a plan; ``None`` leaves one to the step.

    Attributes:
      schedule: takes the place of the schedule of the step's ``treduce``.
      num_microbatches: of ``microbatches`` and ``value_and_grad`` that are called without a number.
      layers_per_stage: the number of layers of each stage of a function under ``mpmd.auto_marks``. ``()``:
        each layer is a stage.
      num_layers: the number of layers of such a function, where ``layers_per_stage`` does not say it;
        ``None``: as many as are found.
      remat: the policies under which layers are computed again in the backward: one for each stage, or one
        for all layers. ``()``: none.
      mark_layers: marks the ends of stages in a function that has no marks, given the number of stages:
        ``mpmd.auto_marks``, which is above the language of steps. ``None`` leaves functions as they are.
      of_loops: the decisions of each loop, in the order in which loops are traced, if they differ. A function
        under ``jax.jit`` is traced once, however often it is called, so its loops have the same decisions in
        each call.
    """

    schedule: Schedule | None = None
    num_microbatches: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    num_layers: int | None = None
    remat: tuple[Remat, ...] = ()
    mark_layers: Callable[[Callable, int | None], Callable] | None = None
    of_loops: tuple[Decisions, ...] = ()


def in_order(of_loops: Mapping[int, Decisions]) -> tuple[Decisions, ...]:
    """Returns ``Decisions.of_loops``, given decisions by the number of a loop; missing loops have none."""
    return tuple(of_loops.get(number, Decisions()) for number in range(1 + max(of_loops, default=-1)))


class _Trace:
    """One trace of a step. It counts the loops, and collects the numbers of slices of ``mpmd.slices``."""

    def __init__(self, slices: set[int]) -> None:
        self.loops = itertools.count()
        self.slices = slices


# The contexts are part of the keys of JAX's caches: functions under ``jax.jit`` are traced anew for other
# decisions, and in each trace, so that each counts the same loops.
_decisions = jax.make_user_context(default_value=Decisions())
_trace = jax.make_user_context(default_value=None)
_compiled = jax.make_user_context(default_value=False)
_planned = jax.make_user_context(default_value=False)
_slices_of_loop = jax.make_user_context(default_value=0)


def current_decisions() -> Decisions:
    return _decisions.value


@contextlib.contextmanager
def next_loop() -> Iterator[int]:
    """A context in which the decisions for the next loop are current.

    Yields: the number of the loop, in the order in which loops are traced; 0 where nothing is decided.
    """
    trace, of_loops = _trace.value, _decisions.value.of_loops
    number = next(trace.loops) if trace else 0
    with _decisions(of_loops[number] if number < len(of_loops) else _decisions.value):
        yield number


def compiling() -> AbstractContextManager[None]:
    """A context in which a step is traced to be compiled, so that marks in its loops end stages."""
    return _compiled(True)


def is_compiled_outside_of_loops() -> bool:
    """Whether a step, and not the function of one of its loops, is traced to be compiled."""
    return _compiled.value and not _slices_of_loop.value


def planning() -> AbstractContextManager[None]:
    """A context in which a step is traced to plan it, so that functions under ``mpmd.cost`` are kernels."""
    return _planned(True)


def is_planned() -> bool:
    return _planned.value


def in_loop(slices: int) -> AbstractContextManager[None]:
    """A context in which the function of a loop is traced, with this number of slices in a microbatch."""
    return _slices_of_loop(slices if _compiled.value else 0)


def slices_of_loop() -> int:
    """Slices in a microbatch of the loop whose function is traced to be compiled; 0 outside of such loops."""
    return _slices_of_loop.value


def note_slices(number: int) -> None:
    trace = _trace.value
    if trace:
        trace.slices.add(number)


def marked_as_decided(fun: Callable, schedule: Schedule | None) -> Callable:
    """The function with the ends of stages that a plan decides, or else of as many as the schedule has.

    Under plain JAX, where stages mean nothing, it is the function itself.

    Args:
      schedule: of the loop, unless one is decided.
    """

    @functools.wraps(fun)
    def marked(*args, **kwargs):
        decisions = current_decisions()
        if decisions.mark_layers is None:
            return fun(*args, **kwargs)
        of_loop = decisions.schedule or schedule
        num_stages = of_loop.num_stages if of_loop and of_loop.num_stages > 1 else None
        return decisions.mark_layers(fun, num_stages)(*args, **kwargs)

    return marked


def with_layers_marked(fun: Callable, mark_layers: Callable[[Callable, int | None], Callable]) -> Callable:
    """Returns ``fun``, traced so that ``mark_layers`` marks functions without marks where no plan decides."""

    @functools.wraps(fun)
    def under_decisions(*args, **kwargs):
        with _decisions(_marking_layers(current_decisions(), mark_layers)):
            return fun(*args, **kwargs)

    return under_decisions


@functools.lru_cache(maxsize=16)  # JAX's caches keep each object that was ever current
def _marking_layers(
    decisions: Decisions, mark_layers: Callable[[Callable, int | None], Callable]
) -> Decisions:
    return dataclasses.replace(decisions, mark_layers=mark_layers)


def decided(fun: Callable, decisions: Decisions, slices: set[int] | None = None) -> Callable:
    """The function, traced under decisions.

    Args:
      slices: gets the numbers of slices that the function cuts sequences into.
    """

    @functools.wraps(fun)
    def under_decisions(*args, **kwargs):
        with _decisions(decisions), _trace(_Trace(set() if slices is None else slices)):
            return fun(*args, **kwargs)

    return under_decisions
