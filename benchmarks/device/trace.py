"""The section of the profile: the seconds of each executable on the device, beside those of the host."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Mapping, Sequence

import jax

import mpmd
from benchmarks.device.gpt_step import gpt_step, size_of
from benchmarks.device.groups import in_process
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Table
from mpmd.ir.events import Event
from mpmd.ir.plan import Plan
from mpmd.runtime.device_trace import executable_seconds, program_name

STAGES = 4


def run(settings: Settings) -> Findings:
    """A step of four stages on one group of this process, traced."""
    step = gpt_step(size_of(settings), STAGES, mpmd.Interleaved1F1B(num_stages=STAGES, mpmd_dim=1))
    with in_process(1) as mesh, tempfile.TemporaryDirectory() as folder:
        compiled = mpmd.jit(step.function, mesh).compile(step.state, *step.batch)
        jax.block_until_ready(compiled(step.state, *step.batch))
        _, events = compiled.profile(step.state, *step.batch, trace_dir=folder)
        return findings_of(compiled.plan, events, executable_seconds(folder))


def findings_of(plan: Plan, events: Sequence[Event], on_device: Mapping[str, float] | None) -> Findings:
    """The time of each executable in one step."""
    names = {str(run.task): run.executable for program in plan.programs for run in program.runs}
    of_host: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.label in names:
            of_host[names[event.label]] += event.duration
    on_device = on_device or {}
    rows = [(name, _ms(on_device.get(program_name(name))), _ms(taken)) for name, taken in of_host.items()]
    header = ("executable", "ms on the device", "ms of the host's tasks")
    faults = () if on_device else ("the trace has no operations of the device",)
    data = {"device": dict(on_device), "host": dict(of_host)}
    return Findings((Table("Executables in one step", header, tuple(rows)),), data, faults)


def _ms(seconds: float | None) -> str:
    return "not recorded" if seconds is None else f"{seconds * 1e3:.3f}"
