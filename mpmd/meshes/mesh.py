"""Groups of this process's devices: a JAX mesh that is cut along one axis, or one mesh per group."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from mpmd.compat import api_boundary
from mpmd.meshes.part import WholeMesh, parts_faults
from mpmd.runtime.captures import collection_fault
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.in_process import InProcessRuntime
from mpmd.runtime.status import GroupStatus, Status
from mpmd.sharding import with_auto_axes
from mpmd.validation import (
    Fault,
    int_fault,
    is_sequence,
    path_fault,
    raise_faults,
    shown,
    str_fault,
    type_fault,
)


class MpmdMesh(WholeMesh):
    """Groups of this process's devices: a mesh cut along the axis ``mpmd_axis_name``, or one mesh per group.

    Every group's submesh keeps all the axes, the mpmd axis with size 1, so that specs may name any other
    axis. In a list, each mesh is a group, and the sizes of its axes are its own::

        mpmd.MpmdMesh([Mesh(devices[:4].reshape(4, 1), ("data", "model")),
                       Mesh(devices[4:].reshape(2, 2), ("data", "model"))])

    A thread per group starts with the first step. They end, after the steps already submitted, with
    ``close``, when ``with`` is left, and when the process exits.

    Args:
      jax_mesh: a mesh of devices of this process, or a sequence of such meshes with the same axes, of the
        same types, and no device in common. Along ``Explicit`` axes, as of ``jax.make_mesh``, the types of
        values in a step say how they are sharded; along ``Auto`` axes the compiler chooses.
      mpmd_axis_name: the axis of the mesh along which the groups are. With a sequence it is left out, or an
        axis of size 1 of each mesh.
      max_in_flight: the number of steps, each with its arguments, that may be under way; a further call
        waits. Each part has this number.
      parts: the number of groups of each part by its name, in the order of the groups, as
        ``{"actor": 4, "sampler": 2}``; see ``part``.
      capture: a directory in which each task that fails, or that makes a value which ``jax.debug_nans`` or
        ``jax.debug_infs`` refuses, gets a directory of its own, for ``mpmd replay``; ten of them at most.

    Raises: ``ValueError`` when the mesh has no such axis, or has ``Manual`` ones, or devices of other
      processes, or when the meshes of a sequence do not have the same axes or share a device; ``TypeError``
      for other types.
    """

    @api_boundary
    def __init__(
        self,
        jax_mesh: Mesh | Sequence[Mesh],
        mpmd_axis_name: str | None = None,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        parts: Mapping[str, int] | None = None,
        capture: str | os.PathLike[str] | None = None,
    ):
        raise_faults(
            *_type_faults(jax_mesh, mpmd_axis_name, max_in_flight),
            *parts_faults(parts),
            path_fault("capture", capture, optional=True),
        )
        raise_faults(collection_fault(capture))
        meshes = [jax_mesh] if isinstance(jax_mesh, Mesh) else list(jax_mesh)
        faults = [*_faults_of_all(meshes)]
        if isinstance(jax_mesh, Mesh):
            axes = ", ".join(map(str, jax_mesh.axis_names))
            if mpmd_axis_name is None:
                faults.append(f"name the axis along which the groups are, mpmd_axis_name: one of {axes}")
            elif mpmd_axis_name not in jax_mesh.axis_names:
                faults.append(f"the mesh has no axis mpmd_axis_name={mpmd_axis_name!r}; its axes are {axes}")
        else:
            faults += _faults_of_groups(meshes, mpmd_axis_name)
        if faults:
            raise ValueError("\n".join(faults))
        self.jax_mesh = jax_mesh
        self.mpmd_axis_name = mpmd_axis_name
        self._max_in_flight = max_in_flight
        self._capture = None if capture is None else Path(capture)
        raise_faults(*parts_faults(parts, self.mpmd_dim))
        super().__init__(parts)

    @functools.cached_property
    def unstack(self) -> list[Mesh]:
        """The submesh of each group."""
        if not isinstance(self.jax_mesh, Mesh):
            return list(self.jax_mesh)
        axis = self.jax_mesh.axis_names.index(self.mpmd_axis_name)
        return [
            Mesh(self.jax_mesh.devices.take([i], axis), self.jax_mesh.axis_names, self.jax_mesh.axis_types)
            for i in range(self.jax_mesh.devices.shape[axis])
        ]

    @property
    def abstract_submeshes(self) -> tuple[AbstractMesh, ...]:
        return tuple(submesh.abstract_mesh for submesh in self.unstack)

    @property
    def platform(self) -> str:
        """The platform of the devices of the first group: ``cpu``, ``cuda``, ``tpu``."""
        return self.unstack[0].devices.flat[0].platform

    @functools.cached_property
    def runtime(self) -> InProcessRuntime:
        runtime = InProcessRuntime([*map(with_auto_axes, self.unstack)], self._max_in_flight)
        runtime.captures.directory = self._capture
        return runtime

    def status(self) -> Status:
        """The state of every group, with its current activity and since when; printable as a table.

        May be called at any time, by any thread: it does not wait for steps.
        """
        devices = [tuple(map(str, submesh.devices.flat)) for submesh in self.unstack]
        runtime = self.__dict__.get("runtime")  # which starts with the first step
        now = runtime.status() if runtime else [("not started", 0)] * len(devices)
        return Status(
            tuple(
                GroupStatus(i, names, state, pending)
                for i, (names, (state, pending)) in enumerate(zip(devices, now, strict=True))
            )
        )

    def close(self) -> None:
        """Ends the groups' threads after the steps already submitted, and frees the groups' values.

        Earlier results of at most 256 bytes, such as losses, have come with the reply of their step, and can
        still be read and passed to steps; larger ones are lost. The mesh can be used again: functions are
        compiled again.
        """
        if runtime := self.__dict__.pop("runtime", None):
            runtime.close()

    def __enter__(self) -> MpmdMesh:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MpmdMesh(jax_mesh={self.jax_mesh!r}, mpmd_axis_name={self.mpmd_axis_name!r})"


def devices_faults(devices: Any) -> Iterator[TypeError | None]:
    if devices is None:
        return
    if not isinstance(devices, Sequence | np.ndarray) or isinstance(devices, str):
        yield TypeError(f"devices must be a sequence of jax devices, or None, not {shown(devices)}")
        return
    for i, device in enumerate(devices):
        yield type_fault(f"devices[{i}]", device, jax.Device, "a jax device")


def _type_faults(jax_mesh: object, mpmd_axis_name: object, max_in_flight: object) -> Iterator[Fault | None]:
    if is_sequence(jax_mesh):
        for group, mesh in enumerate(jax_mesh):
            yield type_fault(f"jax_mesh[{group}]", mesh, Mesh, "a jax.sharding.Mesh")
    else:
        what = "a jax.sharding.Mesh, or a list with one for each group"
        yield type_fault("jax_mesh", jax_mesh, Mesh, what)
    yield str_fault("mpmd_axis_name", mpmd_axis_name, optional=True)
    yield int_fault("max_in_flight", max_in_flight)


def _faults_of_all(meshes: Sequence[Mesh]) -> Iterator[str]:
    for mesh in meshes:
        if manual := [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is _MANUAL]:
            yield (
                f"the mesh's axes {', '.join(map(str, manual))} are Manual, as within a jax.shard_map; "
                "give a mesh of Auto or Explicit axes"
            )
        others = [d for d in mesh.devices.flat if d.process_index != jax.process_index()]
        if others:
            yield (
                f"{len(others)} of the mesh's {mesh.size} devices belong to other processes; "
                "use mpmd.launch for groups in several processes"
            )


def _faults_of_groups(meshes: Sequence[Mesh], mpmd_axis_name: str | None) -> Iterator[str]:
    if not meshes:
        yield "there is no mesh in the list: give one for each group"
        return
    axis_names = meshes[0].axis_names
    holders = collections.defaultdict(list)
    for group, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            holders[device].append(group)
        if mesh.axis_names != axis_names:
            yield (
                f"group {group} has the axes {mesh.axis_names}, but group 0 has {axis_names}; "
                "give all the same axes, of size 1 where a group does not use one"
            )
        elif mpmd_axis_name is not None and mesh.shape.get(mpmd_axis_name) != 1:
            yield (
                f"group {group} has the axes {dict(mesh.shape)}: leave out {mpmd_axis_name!r}, "
                "or have each mesh with an axis of that name and size 1"
            )
        elif mesh.axis_types != meshes[0].axis_types:
            yield (
                f"the axes {axis_names} of group {group} are {_types(mesh)}, but those of group 0 are "
                f"{_types(meshes[0])}; give all the same types, because a step is traced once"
            )
    for device, groups in holders.items():
        if len(groups) > 1:
            yield f"{device} is in the meshes of groups {', '.join(map(str, groups))}, but can be in one only"


_MANUAL = jax.sharding.AxisType.Manual


def _types(mesh: Mesh) -> str:
    return ", ".join(kind.name for kind in mesh.axis_types)
