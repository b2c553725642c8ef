"""The section of recovery: a process is killed, and the training that goes on computes the same losses."""

from __future__ import annotations

import cluster
from benchmarks.device.groups import START_SECONDS, local_ray
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Table
from benchmarks.recovery import EVERY, GROUPS, SIZES, training

SIZE = SIZES[0]


def run(settings: Settings) -> Findings:
    """Kills one of two groups, and runs as many steps again on groups that nothing happens to."""
    options = {
        "platform": settings.platform,
        "gpus_per_group": settings.gpus_of(GROUPS),
        "timeout": START_SECONDS,
    }
    with local_ray(settings):
        with training(SIZE, cluster.Recovery(every=EVERY), **options) as killed:
            phases = killed.seconds_of_recovery()
            killed.block()
        with training(SIZE, None, **options) as undisturbed:
            while len(undisturbed.losses) < len(killed.losses):
                undisturbed.block()
    return findings_of(phases, killed.losses, undisturbed.losses)


def findings_of(phases: dict[str, float], losses: list[float], expected: list[float]) -> Findings:
    """The phases of the recovery, and whether the losses after it are bit for bit those without it."""
    same = losses == expected
    rows = [*((phase, f"{seconds:.2f}") for phase, seconds in phases.items())]
    rows.append(("in all, with steps run again", f"{sum(phases.values()):.2f}"))
    after = (("equal bit for bit", "yes" if same else "no"), ("the last loss", repr(losses[-1])))
    tables = (
        Table("Recovery of a killed group", ("phase", "s"), tuple(rows)),
        Table("Losses, compared with groups that are not killed", ("", "losses"), after),
    )
    faults = () if same else (f"after a recovery the losses are {losses}, not {expected}",)
    return Findings(tables, {"seconds": phases, "losses": losses, "expected": expected}, faults)
