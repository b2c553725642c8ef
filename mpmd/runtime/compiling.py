"""Compiles an executable for a submesh of this process, with XLA's choices and needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import jax

from mpmd.compat import forget_lowered, with_any_sub_byte_layout
from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.plan import Executable, Spec
from mpmd.program import Function, Variant, arguments, jitted
from mpmd.sharding import spec_of, to_sharding
from mpmd.util.stopwatch import Stopwatch

Compiling = Callable[[], AbstractContextManager]
"""Makes a context in which XLA compiles."""


def compile_executable(
    executable: Executable, function: Function, submesh: jax.sharding.Mesh, compiling: Compiling = nullcontext
) -> jax.stages.Compiled:
    lowered = jitted(function, executable, submesh).lower(*arguments(executable))
    forget_lowered()
    with compiling():
        return with_any_sub_byte_layout(lowered.compile())


Compile = Callable[[Executable, Function, jax.sharding.Mesh, Compiling], jax.stages.Compiled]


def compile_with_open_specs(
    executable: Executable,
    function: Function,
    submesh: jax.sharding.Mesh,
    compiling: Compiling = nullcontext,
    compile: Compile = compile_executable,
) -> tuple[jax.stages.Compiled, tuple[Spec, ...]]:
    """Returns also the executable's output specs, with open specs as XLA chose them."""
    assert None not in executable.in_specs, f"{executable.name} has open inputs"
    compiled = compile(executable, function, submesh, compiling)
    chosen = tuple(
        spec_of(sharding, submesh, len(aval.shape)) if spec is None else spec
        for spec, sharding, aval in zip(
            executable.out_specs, compiled.output_shardings, executable.outputs, strict=True
        )
    )
    if not all(
        sharding.is_equivalent_to(to_sharding(spec, submesh), len(aval.shape))
        for spec, sharding, aval in zip(chosen, compiled.output_shardings, executable.outputs, strict=True)
    ):
        # No spec says what the compiler chose.
        closed = dataclasses.replace(executable, out_specs=chosen)
        compiled = compile(closed, function, submesh, compiling)
    return compiled, chosen


def memory_of(compiled: jax.stages.Compiled) -> ExecutableMemory | None:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return ExecutableMemory(
        inputs=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


@dataclasses.dataclass(frozen=True)
class CompiledAhead:
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
