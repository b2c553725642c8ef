"""The section of a small GPT: its step with one, two and four groups, beside plain ``jax.jit``."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import jax

import mpmd
from benchmarks.device.gpt_step import MICROBATCHES, GptStep, gpt_step, size_of
from benchmarks.device.groups import in_process, local_ray, on_ray
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Effort, Table, Times, interleaved, ratio, seconds_of

EFFORT, QUICK_EFFORT = Effort(repetitions=3, seconds=1.0), Effort(repetitions=2, seconds=0.1)
TOLERANCE = 2e-2
"""The largest difference of losses: GPUs round what they multiply to fewer bits than float32 has."""


class Training:
    """Runs steps one after the other, each with the state of the one before; ``losses`` are the last ones."""

    def __init__(self, step: GptStep, function: Any):
        self._step, self._function = step, function
        self.restart()

    def restart(self) -> None:
        """Runs the first step again, which compiles when it is run for the first time."""
        self._state = jax.tree.map(lambda leaf: leaf.copy(), self._step.state)
        self.losses: list[float] = []
        self.run(1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._state, loss = self._function(self._state, *self._step.batch)
        jax.block_until_ready(self._state)
        self.losses.append(float(loss))


def run(settings: Settings) -> Findings:
    """Each number of groups and plain ``jax.jit`` in turns."""
    found = {}
    step = gpt_step(size_of(settings), 1)
    plain = Training(step, jax.jit(step.function, donate_argnums=0))
    with local_ray(settings):
        for groups in (1, 2, 4):
            if groups <= settings.devices:
                with in_process(groups) as mesh:
                    found[f"{groups} in process"] = beside_jit(settings, plain, groups, mesh)
            if groups > 1:
                with on_ray(settings, groups) as mesh:
                    found[f"{groups} on Ray"] = beside_jit(settings, plain, groups, mesh)
    return findings_of(settings, found)


def beside_jit(settings: Settings, plain: Training, groups: int, mesh) -> dict[str, Any]:
    """Seconds of a step of both, and their losses after equally many."""
    effort = QUICK_EFFORT if settings.quick else EFFORT
    step = gpt_step(size_of(settings), groups)
    plain.restart()
    ours = Training(step, mpmd.jit(step.function, mesh, donate_argnums=0))
    steps = effort.steps(max(seconds_of(functools.partial(each.run, 1)) for each in (plain, ours)))
    times = interleaved(
        {
            name: functools.partial(seconds_of, functools.partial(each.run, steps))
            for name, each in (("jit", plain), ("mpmd", ours))
        },
        effort.repetitions,
    )
    of_a_step = {name: [seconds / steps for seconds in each] for name, each in times.items()}
    return {**of_a_step, "losses": [list(plain.losses), ours.losses]}


def findings_of(settings: Settings, found: dict[str, dict[str, Any]]) -> Findings:
    """The table of all numbers of groups, and where the losses differ."""
    rows, faults = [], []
    for where, each in found.items():
        plain, ours = each["losses"]
        difference = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
        if not difference <= TOLERANCE:  # also true of NaN
            faults.append(f"{where}: the losses are {ours}, and of jax.jit {plain}")
        ratio_text = f"{ratio(each['mpmd'], each['jit']):.2f}"
        rows.append((where, _ms(each["jit"]), _ms(each["mpmd"]), ratio_text, f"{difference:.1e}"))
    size = size_of(settings)
    title = (
        f"A step of a GPT of {size.layers} layers of {size.width}, "
        f"{MICROBATCHES} microbatches of {size.rows} x {size.length} tokens"
    )
    header = ("groups", "ms, jax.jit", "ms, mpmd", "mpmd / jit", "difference of losses")
    return Findings((Table(title, header, tuple(rows)),), found, tuple(faults))


def _ms(times: Times) -> str:
    return f"{statistics.median(times) * 1e3:.2f}"
