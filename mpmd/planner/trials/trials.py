"""Makes plans of a step for candidates: with their shardings, donations and decisions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mpmd.arguments.call import Call
from mpmd.arguments.signature import CallSignature, listed
from mpmd.arguments.specs import GroupAxes, input_specs
from mpmd.errors import CompileError
from mpmd.ir.plan import Spec
from mpmd.language.decisions import decided, planning
from mpmd.meshes.abstract_mesh import AbstractMpmdMesh
from mpmd.planner.candidate import Candidate
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.profiling import profile_step
from mpmd.planner.profiling.not_priced import not_priced
from mpmd.planner.trials.realize import (
    Realized,
    decisions_of,
    measured,
    options_of,
    sequence_parallel_of,
    simulated,
    submeshes_of,
)
from mpmd.planner.trials.shardings import AXES, argument_specs
from mpmd.planner.trials.step_arguments import step_arguments
from mpmd.step.jit import jit, with_sequence_parallel
from mpmd.step.lowered_step import LoweredStep


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The step to plan, with the arguments of one call.

    Attributes:
      step: as the user wrote it.
      call: its arguments, without values.
      static: the keywords of ``mpmd.jit`` that name static arguments.
      fixed_specs: the user's specs of leaves; ``None`` for an open one.
      fixed_donations: the arguments that the user donates; ``None`` if that is open.
    """

    step: Callable
    call: Call
    static: Mapping[str, Any]
    fixed_specs: tuple[Spec | None, ...]
    fixed_donations: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        step: Callable,
        args: tuple,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        in_shardings: Any = None,
        kwarg_shardings: Mapping[str, Any] | None = None,
        static_argnums: Any = (),
        static_argnames: Any = (),
        donate_argnums: Any = None,
    ) -> StepSpec:
        """Raises as the call of ``mpmd.jit(step, ...)``."""
        static = {"static_argnums": listed(static_argnums), "static_argnames": listed(static_argnames)}
        signature = CallSignature.of(step, **static, donate_argnums=donate_argnums)
        call = signature.bind(args, dict(kwargs))
        specs: list[Spec | None] = [None] * len(call.avals)
        if in_shardings is not None or kwarg_shardings:
            specs = input_specs(in_shardings, call, GroupAxes(AXES), kwarg_shardings)
        donated = None if donate_argnums is None else signature.donated.argnums
        return cls(step, call.described_by(call.avals), static, tuple(specs), donated)

    @functools.cached_property
    def function(self) -> Callable:
        return self.call.function(self.step)

    @property
    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments that are not static, by position and by name."""
        return jax.tree.unflatten(self.call.treedef, self.call.avals)

    @property
    def traced_positions(self) -> tuple[int, ...]:
        """The positions, as the user counts them, of the arguments that are not static."""
        static = dict(self.call.static)
        return tuple(i for i in range(self.call.num_args) if i not in static)


class Trials:
    """Plans and simulates a step on a cluster under each candidate.

    Attributes:
      profiles: the profiles of the step's loops.
      cluster: the devices.
      written_schedules: the schedules that the loops are written with; ``None`` for a loop without one.
      not_priced: notes on equations that a plan can only guess the costs of.
    """

    def __init__(self, step_spec: StepSpec, cluster: AnyCluster, num_layers: int | None = None):
        self._step_spec = step_spec
        profiled = profile_step(step_spec.function, *step_spec.arguments, num_layers, cluster.flash_attention)
        self.profiles: tuple[LayerProfile, ...] = profiled.profiles
        self.cluster = cluster
        self.written_schedules = tuple(loop.schedule for loop in profiled.written)
        self.not_priced = not_priced(profiled.graph)
        self._arguments = step_arguments(profiled.graph.step)

    @functools.cached_property
    def donate_argnums(self) -> tuple[int, ...]:
        """The positions of donated arguments, as the user counts them: by default those returned updated."""
        if self._step_spec.fixed_donations is not None:
            return self._step_spec.fixed_donations
        args, _ = self._step_spec.arguments
        donated, first = [], 0
        for position, argument in zip(self._step_spec.traced_positions, args, strict=True):
            leaves = range(first, first := first + len(jax.tree.leaves(argument)))
            if leaves and self._arguments.updated.issuperset(leaves):
                donated.append(position)
        return tuple(donated)

    def shardings(self, candidate: Candidate) -> tuple[Any, dict[str, Any] | None]:
        """The specs of positional arguments, and of keyword arguments.

        ``None`` where every group is one device.
        """
        if all(size == 1 for submesh in candidate.submeshes for size in submesh.values()):
            return None, None
        step_spec = self._step_spec
        specs = argument_specs(self._arguments, self.profiles[0].specs, candidate, step_spec.fixed_specs)
        return jax.tree.unflatten(step_spec.call.treedef, [PartitionSpec(*spec) for spec in specs])

    def realize(self, candidate: Candidate) -> Realized:
        """The candidate's plan and costs. Raises ``CompileError`` as ``mpmd.jit``."""
        with planning():
            lowered = self._lower(candidate)
        return simulated(lowered, candidate, self.cluster)

    def measure(self, before: Realized, candidate: Candidate) -> Realized:
        """The same plan with costs by its tasks, which run what ``mpmd.cost`` describes."""
        as_run = dataclasses.replace(before, step=self._lower(candidate))
        # A cluster whose tasks are measured has one pool.
        return measured(as_run, candidate, self.cluster.pools[0])

    def _lower(self, candidate: Candidate) -> LoweredStep:
        """Lowers the step for abstract groups without devices.

        Raises: ``CompileError`` as ``mpmd.jit``, and where JAX refuses the policies of rematerialisation.
        """
        step_spec = self._step_spec
        args, kwargs = step_spec.arguments
        in_shardings, kwarg_shardings = self.shardings(candidate)
        positions = enumerate(step_spec.traced_positions)
        planned = jit(
            decided(step_spec.function, decisions_of(candidate, self.profiles)),
            AbstractMpmdMesh(submeshes_of(candidate)),
            in_shardings=in_shardings,
            kwarg_shardings=kwarg_shardings,
            donate_argnums=[i for i, position in positions if position in self.donate_argnums],
            **options_of(candidate),
        )
        planned = with_sequence_parallel(planned, sequence_parallel_of(candidate, self.profiles))
        try:
            return planned.lower(*args, **kwargs)
        except TypeError as error:
            # JAX refuses to keep complex values by this error alone.
            if not candidate.is_rematerialised or "reduce_precision does not accept" not in str(error):
                raise
            raise CompileError(
                "JAX keeps no complex values under jax.checkpoint; use remat none or nothing_saveable"
            ) from error
