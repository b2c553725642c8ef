"""Runs one group's program: one loop over its operations, with values in a flat slot table.

The executor is the only owner of a step's buffers. It knows nothing of Ray, of other groups, or of
how a transport moves data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mpmd.ir.plan import GroupProgram, Name, Plan
from mpmd.runtime.activity import Activity
from mpmd.runtime.digests import DigestLog
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.operations import Compiled, Operations, StepState
from mpmd.runtime.recording import Recording
from mpmd.runtime.requests import CallbackOperands
from mpmd.runtime.task_keeper import TaskKeeper
from mpmd.runtime.transport import Transport


class Executor:
    """One group's program with its executables compiled and its names resolved to slots.

    Args:
      program: the group's instructions.
      plan: the plan the program belongs to.
      executables: for each executable name, the compiled call.
      constants: for each constant of this group, its array.
      shardings: for each value that this group has, its sharding.
      transport: this group's end of the edges.
      synchronous: wait for each task to end before going on, so that a failure belongs to the task that
        was running. This is for tasks that run on the host's own cores; the queue of an accelerator is to
        be kept full.
      activity: the record of the current operation.
    """

    def __init__(
        self,
        program: GroupProgram,
        plan: Plan,
        executables: Mapping[str, Compiled],
        constants: Mapping[Name, jax.Array],
        shardings: Mapping[Name, jax.sharding.Sharding],
        transport: Transport,
        synchronous: bool,
        activity: Activity,
    ):
        here = program.mpmd_idx
        self.input_names = tuple(leaf.name for leaf in plan.inputs_of(here).values() if leaf.name)
        self.output_names = tuple(leaf.name for leaf in plan.outputs_of(here).values())
        slots = {name: slot for slot, name in enumerate([*self.input_names, *constants])}
        self._constants = tuple(constants.values())
        self._activity = activity
        self._operations = tuple(
            Operations(
                program=program,
                plan=plan,
                slots=slots,
                executables=executables,
                shardings=shardings,
                transport=transport,
                synchronous=synchronous,
            )
        )
        self._outputs = [(slots[name], shardings[name]) for name in self.output_names]
        self._made = len(slots) - len(self.input_names) - len(self._constants)

    def execute(
        self,
        number: int,
        inputs: list[jax.Array],
        callback_operands: list[CallbackOperands],
        refused: NonFinitePolicy | None = None,
        recording: Recording | None = None,
        digests: DigestLog | None = None,
        keeper: TaskKeeper | None = None,
    ) -> list[jax.Array]:
        """Runs one step.

        Args:
          number: the number of the step's run, equal on all groups; it names the step's messages.
          inputs: the values of ``input_names``. Values that the program donates are gone afterwards. The list
            is emptied: a value is freed after its last use only if nothing else refers to it.
          callback_operands: the list that gets the operands of callbacks.
          refused: the values that are errors, if any.
          recording: gets the times of tasks, waits and sends; or ``None``.
          digests: gets the events with digests of their values; or ``None``.
          keeper: keeps the operands and results of a task; or ``None``.

        Returns: the values of ``output_names``. Raises: ``TaskError`` when a task fails here,
        ``StepAborted`` when another group's did.
        """
        assert len(inputs) == len(self.input_names), f"{len(inputs)} inputs for {self.input_names}"
        table: list[Any] = [*inputs, *self._constants, *[None] * self._made]
        inputs.clear()
        state = StepState(
            number, table, callback_operands, refused, recording, digests, self._activity, keeper
        )
        for operation in self._operations:
            operation.perform(state)
        # A result that was received may still be in the host's memory.
        return [
            jax.device_put(value, sharding) if isinstance(value := table[slot], np.ndarray) else value
            for slot, sharding in self._outputs
        ]
