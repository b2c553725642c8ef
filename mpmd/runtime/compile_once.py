"""Compiles an executable once for all groups of a process that share it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future

import jax

from mpmd.compat import compiled_for, keeps_compiled_on_disk
from mpmd.ir.plan import Executable
from mpmd.program import Function, Program
from mpmd.runtime.compiling import Compile, Compiling, compile_executable


def compile_for(program: Program, submeshes: Sequence[jax.sharding.Mesh]) -> Compile:
    """The way to compile a program for groups of this process: each executable once, if code can be shared.

    Code that calls Python, or that JAX's persistent cache may have, cannot be loaded for other devices, so
    each group compiles it. Groups of accelerators do so too: sharing is tested on CPUs alone.
    """
    on_cpus = all(device.platform == "cpu" for submesh in submeshes for device in submesh.devices.flat)
    can_share = on_cpus and not program.python_calls and not keeps_compiled_on_disk()
    return CompileOnce() if can_share else compile_executable


class CompileOnce:
    """Compiles the executables of one program: a ``Compile`` for the threads of several groups.

    The first group that asks for an executable compiles it. The remaining groups wait for the compilation
    and load the code for their own devices, which takes a fiftieth of the time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[Hashable, Future[tuple[jax.stages.Compiled, jax.sharding.Mesh]]] = {}

    def __call__(
        self, executable: Executable, function: Function, submesh: jax.sharding.Mesh, compiling: Compiling
    ) -> jax.stages.Compiled:
        key = (executable, submesh.abstract_mesh)
        with self._lock:
            is_first = key not in self._compiled
            future = self._compiled.setdefault(key, Future())
        if not is_first:
            with compiling():
                compiled, compiled_on = future.result()
                return compiled_for(compiled, [*compiled_on.devices.flat], [*submesh.devices.flat])
        try:
            compiled = compile_executable(executable, function, submesh, compiling)
        except BaseException as error:  # those that wait must not wait for ever
            future.set_exception(error)
            raise
        future.set_result((compiled, submesh))
        return compiled
