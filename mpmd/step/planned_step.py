"""A step whose plan is verified, with the answers that need no run."""

from __future__ import annotations

import abc

from mpmd.compiler.pipeline import CompiledStep
from mpmd.explanation import Explanation, Report, explain_plan, operation_costs
from mpmd.ir.plan import Plan
from mpmd.ir.routes import Topology
from mpmd.simulate import Costs, Simulation
from mpmd.simulate import simulate as simulate_plan
from mpmd.util.notebook import ShownAsText
from mpmd.validation import int_fault, raise_faults, shown, type_fault


class PlannedStep(ShownAsText, abc.ABC):
    """A step with a verified plan: one that is only planned, or one that the groups have loaded."""

    def shown(self) -> str:
        return f"{type(self).__name__} with the plan of {self.plan.shown()}"

    @property
    @abc.abstractmethod
    def compiled(self) -> CompiledStep:
        """The output of the compiler; its specs may still be open."""

    @property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """The verified programs of all groups; printable."""

    @property
    @abc.abstractmethod
    def topology(self) -> Topology:
        """The processes of the groups."""

    @abc.abstractmethod
    def report(self) -> Report:
        """The tasks and the needs of each group, and the seconds of compiling; printable."""

    def simulate(
        self, costs: Costs | None = None, steps: int = 1, operations_per_second: float = 1e12
    ) -> Simulation:
        """The times of all tasks; ``mpmd.render.draw_timeline(simulation, path, of_plan=True)`` draws them.

        Args:
          costs: the times of tasks and messages, such as ``Costs.measured(events)`` of a step's profile; by
            default the time of a task is that of its operations, and messages take none.
          steps: the number of steps that run in a row.
          operations_per_second: the speed of a device, if there are no costs.

        Raises: ``ValueError`` for a speed that is not positive, and as ``mpmd.simulate.simulate``.
        """
        raise_faults(
            type_fault("costs", costs, Costs, "Costs", optional=True),
            int_fault("steps", steps),
        )
        if costs is None:
            costs = operation_costs(self.plan, explain(self).tasks, operations_per_second)
        return simulate_plan(self.plan, costs, steps, self.topology)


def explain(step: PlannedStep) -> Explanation:
    """Explains a step that ``mpmd.jit(...).lower(...)`` or ``mpmd.jit(...).compile(...)`` returned.

    ``print(mpmd.explain(step))`` is an overview: the groups of arguments and results, the messages, and the
    lines of tasks. ``print(mpmd.explain(step).leaf("params['w']"))`` tells all about one leaf.

    Raises: ``TypeError`` for anything but a planned or compiled step.
    """
    if not isinstance(step, PlannedStep):
        raise TypeError(
            "step must be a planned or a compiled step, mpmd.jit(...).lower(...) or "
            f"mpmd.jit(...).compile(...), not {shown(step)}"
        )
    compiled = step.compiled
    return explain_plan(step.plan, step.topology, compiled.program.jaxprs, compiled.step.fed_back)
