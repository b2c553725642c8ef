"""The memory that XLA needs to run an executable."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExecutableMemory:
    """The bytes that XLA needs on each device to run an executable.

    Attributes:
      inputs, outputs: the buffers of the inputs and of the outputs.
      aliased: the outputs that take over buffers of inputs.
      temporaries: the buffers that XLA allocates when the executable starts, and frees when it ends.
      code: the compiled code in the device's memory.
    """

    inputs: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    def __or__(self, other: ExecutableMemory) -> ExecutableMemory:
        """The larger of each number: enough for an executable that two groups or processes have compiled."""
        return ExecutableMemory(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))
