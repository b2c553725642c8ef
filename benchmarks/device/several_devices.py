"""The section of groups of several devices, each of one process: where there are two devices or more."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from benchmarks.device.gpt import TOLERANCE
from benchmarks.device.gpt_step import GptStep, gpt_step, size_of
from benchmarks.device.groups import START_SECONDS, in_process, local_ray
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Table

GROUPS = 2


def run(settings: Settings) -> Findings:
    """The rows of microbatches over the devices of a group, in this process and on Ray."""
    if settings.devices < 2:
        return Findings(
            (Table("Groups of several devices", ("", "reason"), (("skipped", "one device"),)),), {}
        )
    groups = GROUPS if settings.devices >= 2 * GROUPS else 1
    step = gpt_step(size_of(settings), groups)
    _, expected = jax.jit(step.function)(step.state, *step.batch)
    with in_process(groups, data=2) as mesh:
        losses = {"in process": loss_of(step, mesh)}
    with local_ray(settings), launch(settings, groups) as mesh:
        losses["on Ray"] = loss_of(step, mesh)
    return findings_of(groups, losses, float(expected))


def launch(settings: Settings, groups: int):
    """Groups of a process with two devices."""
    return cluster.launch(
        {"stage": groups, "data": 2},
        "stage",
        platform=settings.platform,
        processes_per_group=1,
        cpus_per_group=0.5,
        timeout=START_SECONDS,
    )


def loss_of(step: GptStep, mesh) -> float:
    """The loss of the first step."""
    batch = P(None, "data")
    compiled = mpmd.jit(step.function, mesh, in_shardings=(P(), batch, batch))
    return float(compiled(step.state, *step.batch)[1])


def findings_of(groups: int, losses: dict[str, float], expected: float) -> Findings:
    """The losses beside that of plain ``jax.jit``."""
    rows = tuple((where, f"{loss:.6f}", f"{loss - expected:.1e}") for where, loss in losses.items())
    header = (f"{groups} groups of 2 devices", "loss", "difference from jax.jit")
    faults = tuple(
        f"{where}: the loss is {loss}, and of jax.jit {expected}"
        for where, loss in losses.items()
        if not abs(loss - expected) <= TOLERANCE  # also true of NaN
    )
    data = {"losses": losses, "expected": expected}
    return Findings((Table("Groups of several devices", header, rows),), data, faults)
