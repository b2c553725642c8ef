"""Where the groups are: a jax mesh of this process's devices, cut along one axis."""

from __future__ import annotations

import functools
from typing import Protocol

import jax
from jax.sharding import AbstractMesh

from mpmd.runtime.in_process import InProcessRuntime
from mpmd.runtime.protocol import Runtime


class GroupMesh(Protocol):
    """What compiling and running a step need to know of the groups, wherever they live."""

    @property
    def mpmd_dim(self) -> int:
        """The number of groups."""
        ...

    @property
    def abstract_submesh(self) -> AbstractMesh:
        """The shape of every group's submesh; it has all axes, the mpmd axis with size 1."""
        ...

    @property
    def mpmd_axis_name(self) -> str:
        """The axis along which the groups are."""
        ...

    @property
    def runtime(self) -> Runtime:
        """The running groups."""
        ...


class MpmdMesh:
    """Groups of this process's devices: ``jax_mesh`` cut along the axis ``mpmd_axis_name``.

    Every group's submesh keeps all the axes, the mpmd axis with size 1, so that specs may name any other
    axis. A thread per group starts with the first step. They end, after the steps already submitted, with
    ``close``, when ``with`` is left, and when the process exits.

    Args:
      jax_mesh: a mesh of devices of this process, all axes ``Auto``.
      mpmd_axis_name: the axis of it along which the groups are.

    Raises: ``ValueError`` when the mesh has no such axis, or has devices of other processes.
    """

    def __init__(self, jax_mesh: jax.sharding.Mesh, mpmd_axis_name: str):
        if mpmd_axis_name not in jax_mesh.axis_names:
            raise ValueError(
                f"the mesh has no axis {mpmd_axis_name!r}; its axes are {', '.join(jax_mesh.axis_names)}"
            )
        others = [d for d in jax_mesh.devices.flat if d.process_index != jax.process_index()]
        if others:
            raise ValueError(
                f"{len(others)} of the mesh's {jax_mesh.size} devices belong to other processes; "
                "use cluster.launch for groups in several processes"
            )
        self.jax_mesh = jax_mesh
        self.mpmd_axis_name = mpmd_axis_name

    @property
    def mpmd_dim(self) -> int:
        return self.jax_mesh.shape[self.mpmd_axis_name]

    @functools.cached_property
    def unstack(self) -> list[jax.sharding.Mesh]:
        """The submesh of each group."""
        axis = self.jax_mesh.axis_names.index(self.mpmd_axis_name)
        return [
            jax.sharding.Mesh(self.jax_mesh.devices.take([i], axis), self.jax_mesh.axis_names)
            for i in range(self.mpmd_dim)
        ]

    @property
    def abstract_submesh(self) -> AbstractMesh:
        return self.unstack[0].abstract_mesh

    @property
    def platform(self) -> str:
        """The platform of the devices: ``cpu``, ``cuda``, ``tpu``."""
        return self.jax_mesh.devices.flat[0].platform

    @functools.cached_property
    def runtime(self) -> InProcessRuntime:
        return InProcessRuntime(self.unstack)

    def close(self) -> None:
        """Ends the groups' threads after the steps already submitted, and frees what the groups hold.

        The mesh can be used again: functions are compiled again, and results of before are lost.
        """
        if runtime := self.__dict__.pop("runtime", None):
            runtime.close()

    def __enter__(self) -> MpmdMesh:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MpmdMesh(jax_mesh={self.jax_mesh!r}, mpmd_axis_name={self.mpmd_axis_name!r})"
