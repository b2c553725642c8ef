"""The choice of a plan: the table of candidates, and the step that runs as chosen."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd.compat import api_boundary
from mpmd.language.decisions import Decisions, decided
from mpmd.meshes.group_mesh import GroupMesh, mesh_fault
from mpmd.meshes.mesh import MpmdMesh, devices_faults
from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.choice_table import (
    ChoiceDetails,
    candidate_text,
    row_data,
    terminal_width,
    text_table,
    time_text,
    wrapped,
)
from mpmd.planner.cluster_file import cluster_data
from mpmd.planner.expected_errors import MEMORY_ERROR
from mpmd.planner.hardware import Hardware
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.search.stage_profile import StageProfile, stage_profile
from mpmd.planner.trials.realize import Realized, options_of, sequence_parallel_of, submeshes_of
from mpmd.simulate import Simulation
from mpmd.step.jit import MpmdFunction, jit, with_sequence_parallel
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import first_few, human_bytes
from mpmd.validation import int_fault, raise_faults

SHOWN = 10
"""The number of the best candidates in the text, beside the alternatives to a pipeline."""

MEMORY_OF_A_GPU = 0.75
"""The share of a GPU's memory that JAX allocates unless a variable of ``MEMORY_FRACTIONS`` says otherwise."""

MEMORY_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
"""JAX's two names of one environment variable; JAX refuses both together."""


@dataclasses.dataclass(frozen=True, repr=False)
class Choice(ShownAsText):
    """The result of ``mpmd.plan``; ``print(choice)`` is the table of candidates, and why each lost.

    ::

        with mpmd.launch(**choice.launch) as mesh:      # or choice.mesh(), of this process's devices
            step = choice.jit(mesh)
            state, loss = step(state, batch)

    Attributes:
      rows: the candidates, the best first; then those whose costs are known from formulas alone, then
        candidates that do not fit.
      cluster: the cluster that it was chosen for.
      examples: the rows of a batch, of all microbatches of a step.
      decisions: the decisions that the step is traced under.
      in_shardings: for each leaf of the step's positional arguments that are not static, how the devices of
        a group share it; ``None``: every group is one device.
      kwarg_shardings: the same for the arguments that are passed by name, by name.
      donate_argnums: the arguments that the step returns updated, such as the state.
      memory_margin: the share of the memory of a device that stays free.
      notes: further remarks, such as how many candidates were simulated.
    """

    rows: tuple[Row, ...]
    cluster: AnyCluster
    examples: int
    decisions: Decisions
    in_shardings: Any
    kwarg_shardings: Mapping[str, Any] | None
    donate_argnums: tuple[int, ...]
    memory_margin: float
    notes: tuple[str, ...]
    _step: Callable = dataclasses.field(repr=False)
    _static: Mapping[str, Any] = dataclasses.field(repr=False)
    _realized: Realized = dataclasses.field(repr=False)
    _profiles: tuple[LayerProfile, ...] = dataclasses.field(repr=False)

    @property
    def best(self) -> Row:
        """The row of the chosen candidate."""
        return self.rows[0]

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate."""
        return self.best.candidate

    @property
    def launch(self) -> dict[str, Any]:
        """Arguments of ``mpmd.launch``: the groups, and the processes of groups that span nodes.

        On a cluster of several kinds of devices they have the kind of each group, too. If a group of GPUs
        needs more of their memory than the three quarters that JAX takes by default, ``runtime_env`` sets
        ``XLA_PYTHON_CLIENT_MEM_FRACTION`` in their processes, to all but ``memory_margin``, unless this
        process's environment has it, as the user's choice; groups on other nodes follow the environment of
        Ray there. A ``runtime_env`` of your own takes its place in
        ``mpmd.launch(**{**choice.launch, "runtime_env": ...})``.
        """
        submeshes = self.candidate.submeshes
        arguments: dict[str, Any] = {"groups": submeshes_of(self.candidate)}
        processes = [
            -(-submesh.num_devices // self.cluster.pool(submesh.pool).devices_per_node)
            for submesh in submeshes
        ]
        if max(processes) > 1:
            arguments["processes_per_group"] = processes
        if any(submesh.pool for submesh in submeshes):
            arguments["accelerator_types"] = [submesh.pool for submesh in submeshes]
        if self._needs_more_than_jax_takes() and os.environ.keys().isdisjoint(MEMORY_FRACTIONS):
            variables = {MEMORY_FRACTIONS[0]: f"{1 - self.memory_margin:.4g}"}
            arguments["runtime_env"] = {"env_vars": variables}
        return arguments

    def _needs_more_than_jax_takes(self) -> bool:
        memory = self.best.prediction.memory
        pool = self.cluster.pool(self.candidate.submeshes[memory.group].pool)
        may_be_gpu = not pool.kind.startswith(("TPU", "CPU"))  # other platforms ignore the variable
        return may_be_gpu and memory.total > MEMORY_OF_A_GPU * pool.memory

    @api_boundary
    def mesh(self, devices: Sequence[jax.Device] | None = None) -> MpmdMesh:
        """The chosen groups, of this process's devices.

        Args:
          devices: the devices, in the order of the groups; by default all devices of the process.

        Raises: ``ValueError`` when there are too few.
        """
        raise_faults(*devices_faults(devices))
        devices = jax.local_devices() if devices is None else list(devices)
        groups = submeshes_of(self.candidate)
        sizes = [int(np.prod([*group.values()])) for group in groups]
        if len(devices) < sum(sizes):
            raise ValueError(
                f"the choice is for {sum(sizes)} devices ({candidate_text(self.candidate)}), and there are "
                f"{len(devices)}: plan for a cluster that has as many, or launch the groups on one that does"
            )
        bounds = np.cumsum([0, *sizes])
        return MpmdMesh(
            [
                Mesh(np.array(devices[start:stop]).reshape([*group.values()]), [*group])
                for group, start, stop in zip(groups, bounds, bounds[1:], strict=False)
            ]
        )

    @api_boundary
    def jit(self, mesh: GroupMesh, **options: Any) -> MpmdFunction:
        """The step, cut, scheduled and sharded as chosen, for groups of the chosen shapes.

        Args:
          mesh: what ``mpmd.launch(**choice.launch)`` or ``choice.mesh()`` returned, or any mesh of groups
            of the chosen shapes.
          options: keywords of ``mpmd.jit`` that take the place of the chosen ones, such as
            ``donate_argnums=()`` where the state is still needed after the call.

        Raises: ``ValueError`` for groups of other shapes.
        """
        raise_faults(mesh_fault("mesh", mesh))
        chosen_shapes = submeshes_of(self.candidate)
        shapes = [dict(submesh.shape) for submesh in mesh.abstract_submeshes]
        if not _are_alike(chosen_shapes, shapes):
            raise ValueError(
                f"the choice is for groups of the shapes {chosen_shapes}, and the mesh has {shapes}: take "
                "mpmd.launch(**choice.launch) or choice.mesh()"
            )
        chosen_options = {
            "in_shardings": self.in_shardings,
            "kwarg_shardings": self.kwarg_shardings,
            "donate_argnums": self.donate_argnums,
            **options_of(self.candidate),
            **self._static,
        }
        step = jit(decided(self._step, self.decisions), mesh, **{**chosen_options, **options})
        return with_sequence_parallel(step, sequence_parallel_of(self.candidate, self._profiles))

    def stage_profile(self, loop: int = 0) -> StageProfile:
        """The cost of each range of layers as a stage, on each submesh, and the stages that were chosen.

        ``print`` shows it as a table. Layers are numbered as in ``candidate.layers_per_stage``.

        Args:
          loop: which one of the step's loops.

        Raises: ``ValueError`` when the step has no such loop.
        """
        raise_faults(int_fault("loop", loop, 0))
        loops = self.candidate.loops
        raise_faults(int_fault("loop", loop, 0, most=len(loops) - 1))
        return stage_profile(self._profiles[loop], self.cluster, loops[loop])

    @functools.cached_property
    def simulation(self) -> Simulation:
        """The simulated timeline of each group; ``mpmd.render.draw_timeline(..., of_plan=True)`` draws it."""
        return self._realized.simulation()

    def to_json(self) -> str:
        """The cluster and all rows: seconds, bytes and shares."""
        data = {
            "cluster": cluster_data(self.cluster),
            "examples": self.examples,
            "notes": list(self.notes),
            "rows": [row_data(row, self.examples) for row in self.rows],
        }
        return json.dumps(data, indent=2)

    def details(self) -> ChoiceDetails:
        """The layers, and all numbers of all rows: ``print`` shows them, and ``to_html`` makes a page."""
        return ChoiceDetails(self._heading(), self.rows, self.examples, self._profiles)

    def to_html(self) -> str:
        """The page of ``details``: the layers and all rows as HTML."""
        return self.details().to_html()

    def __str__(self) -> str:
        width = terminal_width()
        lines = [part for line in self._heading().splitlines() for part in wrapped(line, width, 2)]
        return "\n".join([*lines, "", text_table(self.rows, SHOWN, width)])

    def _layer_lines(self) -> Iterator[str]:
        for number, profile in enumerate(self._profiles):
            loop = f" of loop {number}" if len(self._profiles) > 1 else ""
            yield f"layers{loop}: {first_few((layer.name for layer in profile.layers), 3)}"

    def _needed(self, row: Row) -> float:
        """The memory that a row may need at most, over the memory that its devices have for it."""
        capacity = row.capacity(self.cluster) * (1 - self.memory_margin)
        return (1 + MEMORY_ERROR) * row.prediction.memory.total / capacity

    def _memory_notes(self) -> Iterator[str]:
        if self._needed(self.best) <= 1:
            return
        note = f"memory is within {MEMORY_ERROR:.0%} of what devices have: the step may not fit"
        planned = (row for row in self.rows if row.prediction.source != "formula")
        if row := next((row for row in planned if self._needed(row) <= 1), None):
            needed = human_bytes(row.prediction.memory.total)
            note += f"; {candidate_text(row.candidate)} needs {needed}, and takes {time_text(row.prediction)}"
        yield note

    def _heading(self) -> str:
        prediction = self.best.prediction
        nodes = "; ".join(map(_nodes_text, self.cluster.pools))
        free = f", of which {self.memory_margin:.0%} stay free" if self.memory_margin else ""
        lines = [
            f"{nodes}{free}",
            f"chosen: {candidate_text(self.candidate)}",
            f"predicted: {time_text(prediction)} for a step of {self.examples} examples, "
            f"{human_bytes(prediction.memory.total)} ±{MEMORY_ERROR:.0%} on a device of group "
            f"{prediction.memory.group}",
        ]
        return "\n".join([*lines, *self._layer_lines(), *self._memory_notes(), *self.notes])


def _nodes_text(pool: Hardware) -> str:
    nodes = f"{pool.nodes} node{'s' if pool.nodes > 1 else ''}"
    devices = f"{pool.devices_per_node} {pool.kind} device{'s' if pool.devices_per_node > 1 else ''}"
    return f"{nodes} of {' '.join(devices.split())}, each with {human_bytes(pool.memory)}"


def _are_alike(shapes: Sequence[Mapping[str, int]], others: Sequence[Mapping[str, int]]) -> bool:
    def without_axes_of_one(groups: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
        return [{axis: size for axis, size in group.items() if size > 1} for group in groups]

    return without_axes_of_one(shapes) == without_axes_of_one(others)
