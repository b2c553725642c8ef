"""A step with Adam that runs several times in a row; for ``benchmarks.prediction`` and ``choices``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from mpmd.ir.events import Event
from mpmd.step.loaded_step import LoadedStep

OPTIMIZER = optax.adam(1e-3)
STEPS_IN_A_ROW = 3


class RunningStep:
    """A step that runs again and again on the state that it returns."""

    def __init__(self, step: LoadedStep, init: Callable[[], Any], x: np.ndarray, y: np.ndarray):
        self.plan, self.topology = step.plan, step.topology
        self._step, self._batch = step, (x, y)
        self._state = jax.block_until_ready(step.init(init))

    def seconds(self) -> float:
        """Runs steps in a row; returns the seconds of one."""
        start = time.perf_counter()
        for _ in range(STEPS_IN_A_ROW):
            self._state, _ = self._step(self._state, *self._batch)
        for leaf in jax.tree.leaves(self._state):
            leaf.block_until_ready()
        return (time.perf_counter() - start) / STEPS_IN_A_ROW

    def profile(self) -> list[Event]:
        """Runs a step; returns its events."""
        (self._state, _), events = self._step.profile(self._state, *self._batch)
        return events
