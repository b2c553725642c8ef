"""The section of bits: whether a step computes the same bits again, and which executables do not.

Each is run twice in one process, and in a second one, which compiles for itself: with XLA's flag for
deterministic operations, and without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from benchmarks.device.gpt_step import gpt_step, size_of
from benchmarks.device.groups import in_process
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.host import Host
from benchmarks.measure import Table
from mpmd.ir.plan import Executable
from mpmd.program import arguments
from mpmd.runtime.compiling import compile_executable
from tests.support.digests import digests

STAGES = 4
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
WAYS = {"as usual": "", DETERMINISTIC: DETERMINISTIC}

Bits = Mapping[str, Sequence[list[str]]]
"""The digests of each run, of ``STEP`` and of each executable."""

STEP = "the step"


class Repeated:
    """A process that runs a step, and each of its executables, twice."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = Settings(**settings)

    def bits(self) -> Bits:
        step = gpt_step(size_of(self._settings), STAGES, mpmd.Interleaved1F1B(num_stages=STAGES, mpmd_dim=1))
        with in_process(1) as mesh:
            lowered = mpmd.jit(step.function, mesh).lower(step.state, *step.batch)
            compiled = lowered.compile()
            found = {STEP: [digests(compiled(step.state, *step.batch)) for _ in range(2)]}
            # A step that groups have loaded keeps no functions.
            program, (submesh,) = lowered.compiled.program, mesh.unstack
            for executable in program.plan.executables:
                closed = on_one_device(executable)
                function = compile_executable(closed, program.functions[executable.name], submesh)
                values = [arbitrary(each) for each in arguments(closed)]
                runs = ([jnp.array(value) for value in values] for _ in range(2))
                found[executable.name] = [digests(function(*each)) for each in runs]
        return found

    def close(self) -> None:
        """There is nothing to close."""


def on_one_device(executable: Executable) -> Executable:
    """The executable without open specs: on one device there is nothing to choose."""
    specs = ([spec or () for spec in each] for each in (executable.in_specs, executable.out_specs))
    in_specs, out_specs = map(tuple, specs)
    return dataclasses.replace(executable, in_specs=in_specs, out_specs=out_specs)


def arbitrary(array: jax.ShapeDtypeStruct) -> np.ndarray:
    """Values of a shape and dtype: normal floats, small integers; the same ones in each process."""
    random = np.random.default_rng(0)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return random.standard_normal(array.shape).astype(array.dtype)
    return random.integers(0, 2, array.shape).astype(array.dtype)


def run(settings: Settings) -> Findings:
    """Two processes for each way, one after the other."""
    found = {}
    for way, flag in WAYS.items():
        flags = f"{settings.environment().get('XLA_FLAGS', os.environ.get('XLA_FLAGS', ''))} {flag}".strip()
        environment = {**settings.environment(), "XLA_FLAGS": flags}
        processes = []
        for _ in range(2):
            host = Host("benchmarks.device.bits:Repeated", (dataclasses.asdict(settings),), environment)
            with contextlib.closing(host):
                host.ready()
                processes.append(host.call("bits"))
        found[way] = processes
    return findings_of(found)


def findings_of(found: Mapping[str, Sequence[Bits]]) -> Findings:
    """The executables whose bits repeat. A step that does not, although it is asked to, is a fault."""
    rows, data, faults = [], {}, []
    for way, (first, second) in found.items():
        again = [name for name, (one, other) in first.items() if one != other]
        elsewhere = [name for name in first if first[name][0] != second[name][0]]
        rows.append((way, "a second run", _repeats(again), _named(again)))
        rows.append((way, "another process", _repeats(elsewhere), _named(elsewhere)))
        data[way] = {"again": again, "another process": elsewhere}
    if again:
        faults.append(f"with {DETERMINISTIC} a second run differs: {_named([STEP, *again])}")
    header = ("", "compared with", "the step repeats", "executables that do not")
    return Findings((Table("Bits", header, tuple(rows)),), data, tuple(faults))


def _repeats(names: Sequence[str]) -> str:
    return "no" if STEP in names else "yes"


def _named(names: Sequence[str]) -> str:
    return ", ".join(name for name in names if name != STEP) or "none"
