"""The time of simulations: ``python -m benchmarks.simulate [groups] [microbatches]``."""

from __future__ import annotations

import sys
import time

from mpmd.ir.plan import Cell
from mpmd.schedules import Std1F1B
from mpmd.simulate import Costs, Link, simulate


def main(num_groups: int = 64, num_microbatches: int = 7800) -> None:
    """Times 1F1B, by default of about a million tasks; making its lists is not counted."""
    tasks = Std1F1B(num_groups).tasks(num_microbatches)
    count = sum(map(len, tasks))
    print(f"{num_groups} groups, {num_microbatches} microbatches, {count:,} tasks; seconds of processor time")
    report("messages are free", tasks, Costs())
    report("messages take time", tasks, Costs(link=Link(latency=0.25, bandwidth=4)))


def report(name: str, tasks: list[list[Cell]], costs: Costs) -> None:
    start = time.process_time()
    simulated = simulate(tasks, costs)
    found = time.process_time()
    _ = simulated.events, simulated.gaps, simulated.memory
    drawn = time.process_time()
    print(f"{name}: makespan {found - start:.2f} s, events, gaps and memory {drawn - found:.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
