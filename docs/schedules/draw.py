"""Draws the pictures of docs/schedules.md, next to this file: ``python docs/schedules/draw.py``."""

from __future__ import annotations

import dataclasses
import pathlib

from mpmd.render import draw_comparison, draw_timeline
from mpmd.schedules import FAMILIES, Seq1F1B, TaskTimes
from mpmd.simulate import Costs, simulate
from mpmd.simulate.compare import compare

DIRECTORY = pathlib.Path(__file__).parent
GROUPS, MICROBATCHES = 4, 8
SLICES, SLICED_MICROBATCHES = 4, 2
UNITS = {"fwd": 1.0, "bwd": 2.0, "bwdA": 1.0, "bwdW": 1.0}
HEAVY = 1.5
"""How much longer the tasks of the last stage take in the picture of ``ListSchedule``."""


def main() -> None:
    for name, family in FAMILIES.items():
        schedule, costs = family.build(GROUPS), Costs(atomic=True)
        if name == "ListSchedule":
            times = {
                kind: (time,) * (GROUPS - 1) + (HEAVY * time,)
                for kind, time in UNITS.items()
            }
            schedule = dataclasses.replace(
                schedule, times=TaskTimes(**times)
            )
            costs = Costs(
                tasks={
                    (kind, GROUPS - 1): HEAVY * time
                    for kind, time in UNITS.items()
                },
                atomic=True,
            )
        simulation = simulate(schedule.tasks(MICROBATCHES), costs)
        draw_timeline(simulation, DIRECTORY / f"{name}.svg", title=name)
    schedule = Seq1F1B(GROUPS, slices=SLICES)
    costs = Costs(
        {kind: time / SLICES for kind, time in UNITS.items()},
        atomic=True,
    )
    simulation = simulate(
        schedule.tasks(SLICED_MICROBATCHES), costs, slices=SLICES
    )
    draw_timeline(
        simulation,
        DIRECTORY / "Seq1F1B.svg",
        title="Seq1F1B",
        slices=SLICES,
    )
    compared = compare(8, 32, UNITS).candidates
    pages = {
        f"{c.schedule.name}, {c.schedule.num_stages} stages": c.simulation
        for c in compared
    }
    draw_comparison(
        pages,
        DIRECTORY / "comparison.png",
        title="8 groups, 32 microbatches",
    )


if __name__ == "__main__":
    main()
