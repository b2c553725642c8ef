"""The mesh of running groups, which steps are compiled for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from jax.sharding import AbstractMesh, AxisType

from cluster.driver.exports import abstract_submesh
from cluster.driver.runtime import RayRuntime
from cluster.driver.status import ProcessesStatus, ProcessStatus
from cluster.protocol.process_info import ProcessInfo, ProcessPlacement
from cluster.recovery import CorruptionReport, FoundValue, RecoveryReport
from cluster.recovery.runtime import RecoveringRuntime
from mpmd.compat import api_boundary
from mpmd.errors import MESH_CLOSED
from mpmd.ir.routes import Topology
from mpmd.meshes.part import PartMesh, WholeMesh
from mpmd.runtime.captures import directory_fault
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.validation import bool_fault, int_fault, number_fault, path_fault, raise_faults, type_fault


class ClusterMesh(WholeMesh):
    """Running groups, an actor for each process, made by ``mpmd.launch``.

    ``close``, or leaving ``with``, ends the actors and gives their resources back. So do the end of the last
    reference to the mesh, its steps and its arrays, and the exit of the interpreter.

    Args:
      topology: the processes of the groups, and the shape of each group's submesh.
      mpmd_axis_name: the axis along which the groups are; ``None`` where each has a shape of its own.
      axis_types: how steps see the axes that are not ``Auto``.
      platform: of the groups' devices, such as ``cpu`` or ``cuda``.
      runtime: the running groups.
      placement: the nodes of the groups' processes, and their transports.
      seconds: how long each phase of the start took: ``ray``, connecting to Ray or starting it;
        ``resources``, reserving them; ``actors``, until their processes had JAX ready;
        ``transports``, connecting the groups with one another and with the driver.
      recoveries: how groups that had died were replaced.
      corruptions: wrong bits that were noticed.
      on_close: is called once, after the groups have ended.
      parts: the number of groups of each part by its name; without faults.
    """

    def __init__(
        self,
        topology: Topology,
        mpmd_axis_name: str | None,
        axis_types: Mapping[str, AxisType],
        platform: str,
        runtime: RayRuntime | RecoveringRuntime,
        placement: ProcessPlacement,
        seconds: Mapping[str, float],
        recoveries: list[RecoveryReport],
        corruptions: list[CorruptionReport],
        on_close: Callable[[], None],
        parts: Mapping[str, int] | None = None,
    ):
        super().__init__(parts)
        self.topology = topology
        self.mpmd_axis_name = mpmd_axis_name
        self.axis_types = dict(axis_types)
        self.platform = platform
        self._runtime: RayRuntime | RecoveringRuntime | None = runtime
        self._placement = placement
        self.seconds = dict(seconds)
        self._recoveries = recoveries
        self._corruptions = corruptions
        self._on_close: Callable[[], None] | None = on_close
        self._process = os.getpid()

    @property
    def submeshes(self) -> tuple[dict[str, int], ...]:
        """The axis names and sizes of each group's submesh."""
        return tuple(dict(group.axes) for group in self.topology.groups)

    @property
    def abstract_submeshes(self) -> tuple[AbstractMesh, ...]:
        return tuple(abstract_submesh(axes, self.axis_types) for axes in self.submeshes)

    @property
    def processes(self) -> tuple[ProcessInfo, ...]:
        """The processes of the groups, group by group, and where they run."""
        return self._placement.processes

    @property
    def transports(self) -> dict[tuple[int, int], str]:
        """The transport between each two processes of different groups, by their positions."""
        return dict(self._placement.transports)

    @property
    def recoveries(self) -> tuple[RecoveryReport, ...]:
        """Each time that groups died and were replaced, or moved, with ``launch(recovery=...)``."""
        return tuple(self._recoveries)

    @property
    def corruptions(self) -> tuple[CorruptionReport, ...]:
        """Reports of wrong bits with ``Recovery(verify_every=...)``; ``unlocated`` if no group is named."""
        return tuple(self._corruptions)

    @property
    def recovery_seconds(self) -> tuple[float, ...]:
        """The duration of each of the ``recoveries``."""
        return tuple(report.total for report in self._recoveries)

    @property
    def groups(self) -> tuple[ProcessInfo, ...]:
        """The process of each group; the first one of several."""
        return tuple(process for process in self.processes if process.rank == 0)

    @property
    def runtime(self) -> RayRuntime | RecoveringRuntime:
        """The running groups. Raises ``RuntimeError`` after ``close``."""
        if self._runtime is None:
            raise RuntimeError(f"{MESH_CLOSED}; launch another one")
        return self._runtime

    def status(self) -> ProcessesStatus:
        """The activity of every process, and for how long; printable as a table.

        May be called at any time, by any thread: it does not wait for steps, and takes two seconds at most.
        Raises ``RuntimeError`` in a fork.
        """
        if self._runtime is None:
            return ProcessesStatus(tuple(ProcessStatus(process, "closed", 0) for process in self.processes))
        return self._runtime.status()

    @api_boundary
    def resize(self, num_places: int, timeout: float = 60.0) -> None:
        """Gives the first ``num_places`` groups a place of their own; the remaining groups share these.

        With fewer places than groups, the resources of the remaining groups are given back, and the run goes
        on, slower; with as many as groups, each has a place of its own again. Steps that are asked for
        meanwhile wait, and all results are the same, bit by bit. Blocks until the groups have moved.

        Args:
          num_places: from 1 to the number of groups.
          timeout: seconds to wait for room; groups that have no place then move as soon as there is one.

        Raises: ``ValueError`` or ``TypeError`` for other numbers; ``RuntimeError`` when there is no room, the
          mesh was launched without ``recovery``, or a group that is to move has died and
          ``Recovery(parts=...)`` leaves it out: then at once, and ``replace`` comes first.
        """
        raise_faults(
            int_fault("num_places", num_places, most=self.mpmd_dim),
            number_fault("timeout", timeout, "a number of seconds", above=0, finite=True),
            title="resize: ",
        )
        self._recovering("resize moves groups").resize(num_places, timeout)

    @api_boundary
    def find_nan(
        self, to: str | os.PathLike[str] | None = None, *, nans: bool = True, infs: bool = False
    ) -> FoundValue | None:
        """The first task that has made a NaN since the last snapshot; ``None`` if none has.

        For when a loss has shown it, without ``jax.debug_nans``. All groups go back to the snapshot and
        repeat the steps since, and each value that a task passes on is looked at. Afterwards groups have the
        same values as before, and no process was replaced. Blocks meanwhile, and steps wait.

        The bits of the repeated steps are compared with the bits of the first run, also without
        ``Recovery(verify_every=...)``. Where they differ, ``Recovery(on_corruption=...)`` decides: its
        default, ``"raise"``, ends the run with ``mpmd.errors.SilentCorruptionError``.

        Args:
          to: a directory of this machine for the task, with its operands, for ``mpmd replay``; one that does
            not exist or is empty. A task that cannot be written is a ``RuntimeWarning``.
          nans: look for NaNs.
          infs: look for infinities.

        Raises: ``RuntimeError`` when the mesh was launched without ``recovery``, ``ValueError`` for neither
          ``nans`` nor ``infs``, and for a directory that has content; ``SilentCorruptionError`` as above;
          ``StepTimeoutError`` when a repeated step takes longer than ``step_timeout``: then groups go back as
          after a death.
        """
        raise_faults(
            path_fault("to", to, optional=True),
            bool_fault("nans", nans),
            bool_fault("infs", infs),
            title="find_nan: ",
        )
        path = None if to is None else Path(to)
        raise_faults(None if path is None else directory_fault(path), title="find_nan: ")
        if not nans and not infs:
            raise ValueError("find_nan: look for NaNs, nans=True, for infinities, infs=True, or for both")
        return self._recovering("find_nan repeats steps").find_nonfinite(NonFinitePolicy(nans, infs), path)

    def _recovering(self, purpose: str, arguments: str = "") -> RecoveringRuntime:
        runtime = self.runtime
        if not isinstance(runtime, RecoveringRuntime):
            launched = f"launch the mesh with recovery=mpmd.Recovery({arguments})"
            raise RuntimeError(f"{purpose} as recovery does: {launched}")
        return runtime

    @api_boundary
    def replace(self, part: str | PartMesh, timeout: float = 60.0) -> None:
        """Restarts the dead groups of a part that ``Recovery(parts=...)`` leaves out.

        A group is dead when one of its steps, or a copy from or to it, has raised ``GroupDiedError``.
        Restarted groups have the part's programs again, but no values from before: ``mpmd.reshard`` copies
        weights to the groups. Values of the part's living groups stay. While processes start, steps of other
        parts run; then these wait about as long as for a recovery with a spare, and no step runs again. Does
        nothing when all groups of the part live. Blocks until they do.

        Args:
          part: the part or its name.
          timeout: seconds to wait until all groups of the part live.

        Raises: ``ValueError`` or ``TypeError`` for a part of another mesh, or not left out of recovery;
          ``RuntimeError`` when its groups do not restart in time, or the mesh was launched without
          ``recovery``.
        """
        raise_faults(
            type_fault("part", part, str | PartMesh, 'a part of the mesh or its name, such as "sampler"'),
            number_fault("timeout", timeout, "a number of seconds", above=0, finite=True),
            title="replace: ",
        )
        if isinstance(part, PartMesh) and part.whole is not self:
            raise ValueError(f"replace: {part!r} is a part of another mesh")
        part = self.part(part if isinstance(part, str) else part.part_name)
        arguments = f"parts={{{part.part_name!r}: None}}"
        runtime = self._recovering("replace starts groups", arguments)
        if not runtime.left_out.issuperset(part.mpmd_idxs):
            raise ValueError(
                f"replace: groups of the part {part.part_name!r} are replaced by themselves; "
                f"Recovery({arguments}) leaves this to the program"
            )
        runtime.replace(part.mpmd_idxs, timeout)

    def close(self) -> None:
        """Ends the actors; pending steps fail. Disconnects from Ray if ``launch`` has connected.

        Results of at most 256 bytes, such as losses, whose steps have ended can still be read, as after
        ``MpmdMesh.close``; larger ones are lost.

        Does nothing in a fork, in which the mesh is another process's.
        """
        if os.getpid() != self._process:
            return
        runtime, self._runtime = self._runtime, None  # so that nothing of its programs stays in memory
        if runtime:
            runtime.close()
        on_close, self._on_close = self._on_close, None
        if on_close:
            on_close()

    def __enter__(self) -> ClusterMesh:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        nodes = len({process.node_id for process in self.processes})
        state = "" if self._on_close else ", closed"
        sizes = {name: len(groups) for name, groups in self.parts.items()}
        parts = f", parts={sizes}" if sizes else ""
        shape: object = list(self.submeshes)
        if self.mpmd_axis_name and all(axes == self.submeshes[0] for axes in self.submeshes):
            shape = {**self.submeshes[0], self.mpmd_axis_name: self.mpmd_dim}
        return (
            f"ClusterMesh({shape}, mpmd_axis={self.mpmd_axis_name!r}{parts}, "
            f"platform={self.platform!r}, nodes={nodes}{state})"
        )
