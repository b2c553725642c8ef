"""A group's part of a program, compiled, and the reply to the driver that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.program import Variant
from mpmd.runtime.executor import Executor
from mpmd.util.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A group's part of a program.

    Attributes:
      executor: runs the part.
      executables: the compiled executables, by the names in the plan.
      shardings, donated: the sharding of each input, and whether the program takes the input over.
      inline: the positions of the outputs that travel with the reply: small ones that this process can read.
      received: the positions of the outputs that other groups send.
      enable_x64: JAX's setting when the part was compiled, under which it has to run.
    """

    executor: Executor
    executables: Mapping[str, jax.stages.Compiled]
    shardings: tuple[jax.sharding.Sharding, ...]
    donated: tuple[bool, ...]
    inline: tuple[int, ...]
    received: tuple[int, ...]
    enable_x64: bool


@dataclasses.dataclass(frozen=True)
class CompiledAhead:
    """The compiled executables of a program that is not loaded yet, and the seconds of XLA."""

    calls: dict[Variant, jax.stages.Compiled] = dataclasses.field(default_factory=dict)
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)


@dataclasses.dataclass(frozen=True)
class LoadReply:
    """The reply of a process of a group that has loaded a program.

    Attributes:
      xla_seconds: how long XLA took.
      memory: the need of each executable, where the backend says it.
      memory_limit: the bytes that each of its devices has.
    """

    xla_seconds: float
    memory: Mapping[str, ExecutableMemory]
    memory_limit: int

    def __or__(self, other: LoadReply) -> LoadReply:
        both = {name: self.memory[name] | other.memory[name] for name in self.memory.keys() & other.memory}
        limit = min(self.memory_limit, other.memory_limit)
        return LoadReply(max(self.xla_seconds, other.xla_seconds), both, limit)
