"""Simulates a step: the times of tasks, the reasons of waits, and the memory of groups.

A schedule's lists of tasks or a ``Plan`` enters, with ``Costs``; a ``Simulation`` leaves. No devices and no
JAX take part. Start reading in ``workload.py``, which runs the operations of a step; ``sharing.py`` runs the
operations of groups that share cores. ``schedule.py`` and ``plan.py`` turn schedules and plans into
operations, ``result.py`` has the result, and ``compare.py`` ranks schedules.
"""

from __future__ import annotations

import math

from mpmd.ir.plan import Plan
from mpmd.ir.routes import Topology
from mpmd.schedules import TaskLists
from mpmd.schedules.base import check_task_lists
from mpmd.schedules.check import total_order
from mpmd.schedules.text import slice_numbers
from mpmd.simulate.costs import Costs, Link
from mpmd.simulate.plan import MessageBytes, plan_workload
from mpmd.simulate.result import Gap, Simulation
from mpmd.simulate.schedule import schedule_workload
from mpmd.simulate.sharing import run_sharing
from mpmd.simulate.workload import DeadlockError, run
from mpmd.validation import int_fault, raise_faults, size_fault, type_fault
from mpmd.verify.channels import check_deadlock, check_messages, rendezvous_order

__all__ = ["Costs", "Gap", "Link", "MessageBytes", "Simulation", "simulate"]


def simulate(
    program: TaskLists | Plan,
    costs: Costs | None = None,
    steps: int = 1,
    topology: Topology | MessageBytes | None = None,
    slices: int = 1,
) -> Simulation:
    """Simulates groups that run their lists in order, each task as early as possible.

    ::

        simulated = simulate(Std1F1B(4).tasks(8), Costs(link=Link(latency=0.25)))
        print(simulated.makespan, simulated.bubble, simulated.peaks)

    Args:
      program: a schedule's lists of cells, group 0 first, or a plan.
      costs: the times of tasks and messages; by default a ``bwd`` takes 2, other tasks 1, and messages 0.
      steps: the number of steps that run in a row. A group starts the next step as soon as it has ended the
        step before, since its weights are its own; the groups do not wait for one another in between.
      topology: the processes of a plan's groups, ``step.topology``: a message has the bytes that travel
        between processes. ``None``: a message has the bytes of its values, as between groups of one process.
        Or a function that returns the bytes of a value on an edge.
      slices: the number of slices of each microbatch in a schedule's lists, ``schedule.slices``; ignored for
        a plan.

    Raises: ``TypeError`` for other types; ``ValueError`` when the groups deadlock, with the wait of each.
    """
    raise_faults(
        type_fault("costs", costs, Costs, "Costs", optional=True),
        size_fault("steps", steps),
        int_fault("slices", slices),
        None
        if topology is None or callable(topology)
        else type_fault("topology", topology, Topology, "a Topology, or a function of an edge and a name"),
    )
    if not isinstance(program, Plan):
        check_task_lists("program", program)
    costs = costs or Costs()
    try:
        workload = (
            plan_workload(program, costs, topology)
            if isinstance(program, Plan)
            else schedule_workload(program, costs, slices)
        )
        runs = run if math.isinf(costs.at_once) else run_sharing
        return Simulation.of(workload, runs(workload, steps))
    except DeadlockError:
        if isinstance(program, Plan):
            # An order exists only of messages that are both sent and received.
            faults = [*check_messages(program)] or check_deadlock(program, rendezvous_order(program))
            raise ValueError("\n  - ".join(["the groups get stuck:", *faults])) from None
        total_order(program, slice_numbers(program, slices))  # raises an error that shows the lists
        raise
