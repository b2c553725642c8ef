"""Keeps the operands and results of one task on its group, while the group runs a step."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from mpmd.runtime.requests import Capture, Captured

VARIABLES = ("NPROC", "XLA_FLAGS")
"""The environment variables on which the bits of results depend: XLA's threads, and its options."""


class TaskKeeper:
    """Keeps the operands and results of one task while a group runs a step.

    Args:
      capture: the request that names the task.
      copies_donated: whether to copy donated operands before each task, because any task may have to be kept.
    """

    def __init__(self, capture: Capture, copies_donated: bool):
        self._capture = capture
        self._copies_donated = copies_donated
        self._task: str | None = None
        self._text = ""
        self._operands: list[Any] = []
        self._results: list[Any] = []

    def begin(self, task: str, text: str, operands: Sequence[Any], donated: Collection[int]) -> None:
        """Records the operands of a task that is about to run.

        Args:
          text: the task's name in errors.
          donated: the positions of the operands that the task takes over.
        """
        if self._capture.task not in (None, task):
            return
        is_named = self._capture.task is not None
        self._operands.clear()  # of the task before: what it has freed must be free
        self._results.clear()
        self._task, self._text = task, text
        self._operands += [
            _copied(value) if is_named or (self._copies_donated and i in donated) else value
            for i, value in enumerate(operands)
        ]

    def end(self, task: str, results: Sequence[Any]) -> None:
        if self._task == task and not self._results:
            self._results += map(_copied, results) if self._capture.task is not None else results

    @property
    def arrays(self) -> list[jax.Array]:
        return [
            value
            for value in self._operands
            if isinstance(value, jax.Array)
            and not value.is_deleted()
            and jnp.issubdtype(value.dtype, jnp.inexact)
        ]

    def kept(self, mpmd_idx: int, device: jax.Device) -> tuple[Captured, tuple[jax.Array, ...]] | None:
        if self._task is None:
            return None
        lost = tuple(i for i, value in enumerate(self._operands) if _is_gone(value))
        captured = Captured(
            capture=self._capture,
            mpmd_idx=mpmd_idx,
            task=self._task,
            text=self._text,
            num_inputs=len(self._operands),
            lost=lost,
            platform="cpu" if device.platform == "cpu" else export.default_export_platform(),
            device_kind=device.device_kind,
            environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        )
        values = [value for value in self._operands if not _is_gone(value)] + self._results
        return captured, tuple(map(_on_device, values))


def _copied(value: Any) -> Any:
    """A copy that no task takes over."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return jax.device_put(value, value.sharding, may_alias=False)  # compiles nothing


def _is_gone(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.is_deleted()


def _on_device(value: Any) -> jax.Array:
    """A value that was received may still be in the memory of a message, which it would hold."""
    return jax.device_put(value.copy()) if isinstance(value, np.ndarray) else value
