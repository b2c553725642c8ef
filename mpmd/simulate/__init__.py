"""Simulates a step: when each task starts and ends, what groups wait for, and what they hold.

It needs no devices and no JAX, so schedules can be compared, and invented, without either.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.ir import Cell, Plan
from mpmd.schedules.check import total_order
from mpmd.simulate.costs import Costs, Link
from mpmd.simulate.plan import of_plan
from mpmd.simulate.result import Gap, Simulation
from mpmd.simulate.schedule import of_schedule
from mpmd.simulate.workload import run

__all__ = ["Costs", "Gap", "Link", "Simulation", "simulate"]


def simulate(
    program: Sequence[Sequence[Cell]] | Plan, costs: Costs | None = None, steps: int = 1
) -> Simulation:
    """When everything happens if each group runs its list in order, each task as early as it can.

    ::

        simulated = simulate(Std1F1B(4).tasks(8), Costs(link=Link(latency=0.25)))
        print(simulated.makespan, simulated.bubble, simulated.peaks)

    Args:
      program: a schedule's lists of cells, of which the first is group 0's, or a plan.
      costs: how long tasks and messages take; unless given, a ``bwd`` takes 2, other tasks 1, messages 0.
      steps: how many steps to run in a row. A group starts the next step as soon as it is through with the
        one before, since its weights are its own; the groups do not wait for one another in between.

    Raises: ``ValueError`` when the groups get stuck, with what each waits for.
    """
    if steps < 1:
        raise ValueError(f"there has to be at least one step, got steps={steps}")
    costs = costs or Costs()
    workload = of_plan(program, costs) if isinstance(program, Plan) else of_schedule(program, costs)
    try:
        return Simulation.of(workload, run(workload, steps))
    except ValueError as error:
        stuck = error
    if not isinstance(program, Plan):
        total_order(program)  # raises an error that shows the lists
    raise stuck
