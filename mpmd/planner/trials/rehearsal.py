"""Runs the program of one group without the rest of the groups, with arbitrary values as their messages.

The group never waits for a message. The order of its tasks, the values that it holds and frees, and the
contents of its caches are the same as in a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir.events import Event
from mpmd.ir.plan import Aval, Plan, Recv
from mpmd.program import Program
from mpmd.runtime.activity import Activity
from mpmd.runtime.executor import Executor
from mpmd.runtime.operations import Compiled, StepState
from mpmd.runtime.recording import Recording
from mpmd.runtime.transport import Array, MessageId


class Rehearsal:
    """A group's program on some submesh of the group's shape.

    Args:
      program: the program, with all specs resolved.
      executables: the executables of the group, compiled for the submesh.
    """

    def __init__(
        self,
        program: Program,
        mpmd_idx: int,
        submesh: jax.sharding.Mesh,
        executables: Mapping[str, Compiled],
    ):
        plan = program.plan
        self.mpmd_idx = mpmd_idx
        self._runs = plan.programs[mpmd_idx].runs
        self._executor = Executor(
            plan=plan,
            mpmd_idx=mpmd_idx,
            submesh=submesh,
            executables=executables,
            constants=program.constants,
            transport=_Present(plan, mpmd_idx),
        )
        self._leaves = [
            (leaf.aval, self._executor.shardings[leaf.name], leaf.donated)
            for leaf in plan.inputs_of(mpmd_idx).values()
            if leaf.name
        ]
        self._kept = [
            None if donated else jax.device_put(some_values(aval), sharding)
            for aval, sharding, donated in self._leaves
        ]
        self._results: list[jax.Array] = []

    def step(self) -> list[tuple[str, Event]]:
        inputs = jax.block_until_ready(self._inputs())
        recording = Recording(time.perf_counter_ns())
        with jax.debug_nans(False), jax.debug_infs(False):  # arbitrary values may make some
            state = StepState(0, Activity(), recording=recording)
            self._results = jax.block_until_ready(self._executor.execute(state, inputs))
        events = (task.event(self.mpmd_idx) for task in recording.tasks)
        return [(run.executable, event) for run, event in zip(self._runs, events, strict=True)]

    def _inputs(self) -> list[jax.Array]:
        """The inputs of a step.

        Donated ones are results of the step before, as in training: so steps use the same memory again.
        """
        kept_ids = set(map(id, self._kept))
        unused = {id(result): result for result in self._results if id(result) not in kept_ids}
        self._results = []
        inputs = []
        for kept, (aval, sharding, _) in zip(self._kept, self._leaves, strict=True):
            like = next((key for key, result in unused.items() if _is_like(result, aval, sharding)), None)
            if kept is not None:
                inputs.append(kept)
            elif like is None:
                inputs.append(jax.device_put(some_values(aval), sharding, may_alias=False))
            else:
                inputs.append(unused.pop(like))
        return inputs


def _is_like(array: jax.Array, aval: Aval, sharding: jax.sharding.Sharding) -> bool:
    is_of_aval = (array.shape, array.dtype) == (aval.shape, jnp.dtype(aval.dtype))
    return is_of_aval and array.sharding.is_equivalent_to(sharding, array.ndim)


class _Present:
    """A transport whose messages are all in the host's memory from the start; sent ones are dropped."""

    arrived = 0

    def __init__(self, plan: Plan, mpmd_idx: int):
        avals = plan.avals()
        of_avals: dict[Aval, np.ndarray] = {}
        self._messages: dict[tuple[int, int], list[np.ndarray]] = {}
        for instruction in plan.programs[mpmd_idx].instructions:
            if isinstance(instruction, Recv):
                received = [avals[name] for name in instruction.values]
                for aval in received:
                    if aval not in of_avals:
                        of_avals[aval] = np.asarray(some_values(aval))
                self._messages[instruction.src, instruction.tag] = [of_avals[aval] for aval in received]

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        pass

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        return self._messages[message.src, message.tag]


def some_values(aval: Aval) -> np.ndarray:
    """An array of small numbers: equal ones would take some devices less power, and so less time."""
    dtype = jnp.dtype(aval.dtype)
    numbers = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.inexact):
        pattern = (0.1 * numbers.standard_normal(4093)).astype(dtype)
    else:
        pattern = numbers.integers(0, 2 if jnp.issubdtype(dtype, jnp.bool) else 128, 4093).astype(dtype)
    return np.resize(pattern, aval.shape)
