"""A step whose plan is verified, with the answers that need no run."""

from __future__ import annotations

import abc
import collections
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from mpmd.arguments.call import Call
from mpmd.arguments.signature import CallSignature
from mpmd.compat import api_boundary
from mpmd.compiler.pipeline import CompiledStep
from mpmd.explanation import Explanation, Report, explain_plan, operation_costs, report
from mpmd.ir.plan import InputLeaf, OutputLeaf, Plan
from mpmd.ir.routes import Topology
from mpmd.ir.stack import Leaf
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.runtime.collectives import ExecutableAnalysis
from mpmd.sharding import to_sharding
from mpmd.simulate import Costs, Simulation
from mpmd.simulate import simulate as simulate_plan
from mpmd.util.notebook import ShownAsText
from mpmd.validation import raise_faults, shown, size_fault, type_fault


class PlannedStep(ShownAsText, abc.ABC):
    """A step with a verified plan: one that is only planned, or one that the groups have loaded.

    It has the attributes of ``jax.stages.Lowered`` and ``jax.stages.Compiled`` that have a meaning for many
    executables on several groups.

    Args:
      compiled: the output of the compiler; its specs may still be open.
      call: that for which it was compiled, without arrays.
      signature: the kinds of the arguments.
    """

    def __init__(self, compiled: CompiledStep, call: Call, mesh: GroupMesh, signature: CallSignature):
        self.compiled = compiled
        self._call = call
        self.mesh = mesh
        self.signature = signature

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}; step.report(), step.plan and "
            "mpmd.explain(step) describe the many executables of a step"
        )

    def shown(self) -> str:
        return f"{type(self).__name__} with the plan of {self.plan.shown()}"

    @property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """The verified programs of all groups; printable."""

    @abc.abstractmethod
    def _analyses(self, *text_arguments: Any, **text_options: Any) -> Mapping[str, ExecutableAnalysis]: ...

    @property
    def topology(self) -> Topology:
        """The processes of the groups."""
        return self.mesh.topology

    @property
    def submeshes(self) -> tuple[AbstractMesh, ...]:
        """The shapes of the groups' submeshes."""
        return self.mesh.abstract_submeshes

    @property
    def args_info(self) -> Any:
        """The pair of the positional and the named arguments, with a ``jax.stages.ArgInfo`` for each leaf."""
        infos = map(jax.stages.ArgInfo, map(jax.typeof, self._call.avals), self._call.donated)
        return jax.tree.unflatten(self.in_tree, infos)

    @property
    def in_tree(self) -> Any:
        """The structure of ``args_info``."""
        return self._call.treedef

    # As in JAX, these follow from ``args_info``.
    in_avals = jax.stages.Traced.in_avals
    donate_argnums = jax.stages.Traced.donate_argnums

    @property
    def out_info(self) -> Any:
        """The result, with a ``jax.ShapeDtypeStruct`` for each leaf."""
        return self.compiled.step.out_shape

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return jax.tree.structure(self.out_info)

    @property
    def input_shardings(self) -> Any:
        """The pair of arguments with the sharding of each leaf on the first group that reads it."""
        return self._shardings(self.in_tree, self.compiled.step.argument_leaves, self.plan.inputs)

    @property
    def output_shardings(self) -> Any:
        """The result with the sharding of each leaf on the first group that holds it."""
        return self._shardings(self.out_tree, self.compiled.step.result_leaves, self.plan.outputs)

    def _shardings(self, tree: Any, leaves: Iterable[Leaf], values: Iterable[InputLeaf | OutputLeaf]) -> Any:
        """A stacked leaf has the sharding of its first layer range."""
        of_names = {
            value.path: to_sharding(value.spec or (), self.submeshes[min(value.mpmd_idxs, default=0)])
            for value in values
        }
        return jax.tree.unflatten(tree, [of_names[leaf.names[0]] for leaf in leaves])

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        """The modules of all executables: of a lowered step JAX's, of a compiled one XLA's.

        A lowered step takes the arguments of ``jax.stages.Lowered.as_text``, and a compiled one none.
        """
        return "\n\n".join(analysis.text for analysis in self._analyses(*args, **kwargs).values())

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimates for a step, by JAX's names, such as ``flops`` and ``bytes accessed``.

        They are sums over the tasks of all groups: an executable counts as often as it runs in a step. As in
        JAX, a lowered step counts whole arrays, and a compiled one the work of one device of each group,
        after XLA's optimizations. Empty where XLA has none, as for lowered steps on some platforms.
        """
        runs = collections.Counter(run.executable for program in self.plan.programs for run in program.runs)
        totals = collections.defaultdict[str, float](float)
        for name, analysis in self._analyses().items():
            for key, value in analysis.costs.items():
                # Not numbers of one operand, as ``bytes accessed0{}``, nor those that XLA does not know.
                if value >= 0 and not key.endswith("}"):
                    totals[key] += runs[name] * value
        return dict(totals)

    @abc.abstractmethod
    def report(self) -> Report:
        """The tasks and the needs of each group, and the seconds of compiling; printable."""

    def _report(self, **measured: Any) -> Report:
        return report(
            plan=self.plan,
            topology=self.topology,
            updated={argument for argument, _ in self.compiled.step.fed_back},
            findings=explain(self).findings,
            **measured,
        )

    @api_boundary
    def simulate(
        self, costs: Costs | None = None, steps: int = 1, operations_per_second: float = 1e12
    ) -> Simulation:
        """The times of all tasks; ``mpmd.render.draw_timeline(simulation, path, of_plan=True)`` draws them.

        Args:
          costs: the times of tasks and messages, such as ``Costs.measured(events)`` of a step's profile; by
            default the time of a task is the time of its operations, and messages take no time.
          steps: the number of steps that run in a row.
          operations_per_second: the speed of a device, if there are no costs.

        Raises: ``ValueError`` for a speed that is not positive, and as ``mpmd.simulate.simulate``.
        """
        raise_faults(
            type_fault("costs", costs, Costs, "Costs", optional=True),
            size_fault("steps", steps),
        )
        if costs is None:
            costs = operation_costs(self.plan, self.compiled.program.jaxprs, operations_per_second)
        return simulate_plan(self.plan, costs, steps, self.topology)


@api_boundary
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
