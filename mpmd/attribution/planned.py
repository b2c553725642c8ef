"""A finding on a step that has not run: equal stages, by the same simulation as of a profile."""

from __future__ import annotations

from mpmd.attribution.alternatives import MOST_TASKS
from mpmd.attribution.model import StepModel
from mpmd.attribution.scenarios import with_equal_stages
from mpmd.attribution.simulated import attribute_simulation
from mpmd.attribution.texts import equal_stages_text, less_text
from mpmd.ir.plan import Plan
from mpmd.simulate import Costs, simulate


def equal_stages_finding(plan: Plan, costs: Costs) -> str | None:
    """The part of a simulated step that equal stages would save, as findings of profiles say it.

    ``None`` for more than ``MOST_TASKS``, whose simulation would take longer than it is worth.
    """
    if sum(1 for program in plan.programs for _ in program.runs) > MOST_TASKS:
        return None
    model = StepModel.of(attribute_simulation(simulate(plan, costs), plan.loops))
    saves = model.makespan - with_equal_stages(model).makespan
    return equal_stages_text(less_text(saves / (model.makespan or 1)))
