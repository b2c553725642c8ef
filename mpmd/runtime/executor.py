"""Runs one group's program: one loop over its operations, with values in a flat slot table.

The executor is the only owner of a step's buffers. It knows nothing of Ray, of other groups, or of
how a transport moves data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mpmd.ir.plan import Name, Plan
from mpmd.ir.routes import held_specs
from mpmd.runtime.operations import CheckValues, Compiled, Operations, StepState
from mpmd.runtime.requests import INLINE_BYTES
from mpmd.runtime.transport import Transport
from mpmd.sharding import to_sharding


class Executor:
    """One group's program with its executables compiled and its names resolved to slots.

    Args:
      plan: the plan, whose specs are all known.

    Attributes:
      donated: for each input, whether the program takes it over.
      inline: the positions of the outputs that travel with the reply: small ones that this process can read.
      received: the positions of the outputs that other groups send.
      enable_x64: JAX's setting when the executables were compiled, under which they have to run.
      synchronous: wait for each task to end before going on, so that a failure belongs to the task that
        was running. This is for tasks that run on the host's own cores; the queue of an accelerator is to
        be kept full.
    """

    def __init__(
        self,
        plan: Plan,
        mpmd_idx: int,
        submesh: jax.sharding.Mesh,
        executables: Mapping[str, Compiled],
        constants: Mapping[Name, np.ndarray],
        transport: Transport,
    ):
        specs = held_specs(plan, mpmd_idx, submesh.shape)
        self.shardings = shardings = {name: to_sharding(spec, submesh) for name, spec in specs.items()}
        self.executables: Mapping[str, Any] = executables  # compiled by JAX, or what wraps that
        self.enable_x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        self.synchronous = submesh.devices.flat[0].platform == "cpu"
        inputs, results = plan.inputs_of(mpmd_idx).values(), plan.outputs_of(mpmd_idx).values()
        input_names = [leaf.name for leaf in inputs if leaf.name]
        self.input_shardings = tuple(shardings[name] for name in input_names)
        self.donated = tuple(leaf.donated for leaf in inputs)
        self.inline = tuple(
            i
            for i, leaf in enumerate(results)
            if leaf.aval.nbytes <= INLINE_BYTES and _is_readable(shardings[leaf.name])
        )
        received = plan.programs[mpmd_idx].received
        self.received = tuple(i for i, leaf in enumerate(results) if leaf.name in received)
        names = [leaf.name for leaf in plan.constants_of(mpmd_idx)]
        self._constants = [put(constants[name], shardings[name]) for name in names]
        slots = {name: slot for slot, name in enumerate([*input_names, *names])}
        self._checking = tuple(
            Operations(
                plan=plan,
                mpmd_idx=mpmd_idx,
                slots=slots,
                executables=executables,
                shardings=shardings,
                transport=transport,
                synchronous=self.synchronous,
            )
        )
        self._operations = tuple(each for each in self._checking if not isinstance(each, CheckValues))
        self._outputs = [(slots[leaf.name], shardings[leaf.name]) for leaf in results]
        self._num_computed = len(slots) - len(input_names) - len(names)

    def execute(self, state: StepState, inputs: list[jax.Array]) -> list[jax.Array]:
        """Runs one step.

        Args:
          inputs: the group's inputs, in plan order. Values that the program donates are gone afterwards. The
            list is emptied, because a value is freed after its last use only if no reference to it is left.

        Returns: the group's outputs, in plan order. Raises: ``TaskError`` when a task fails here,
        ``StepAborted`` when another group's did.
        """
        assert len(inputs) == len(self.donated), f"{len(inputs)} inputs, not {len(self.donated)}"
        table = state.table = [*inputs, *self._constants, *[None] * self._num_computed]
        inputs.clear()
        for operation in self._operations if state.refused is None else self._checking:
            operation.perform(state)
        # A result that was received may still be in the host's memory.
        outputs = [
            jax.device_put(value, sharding) if isinstance(value := table[slot], np.ndarray) else value
            for slot, sharding in self._outputs
        ]
        table.clear()  # ``state`` refers to it: a batch would count as memory in use after the step
        return outputs


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array on the devices; each of several processes of a group has the whole array."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # device_put would compare the arrays of all processes, which takes much longer than the copy.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or ()])


def _is_readable(sharding: jax.sharding.Sharding) -> bool:
    return sharding.is_fully_addressable or sharding.is_fully_replicated
