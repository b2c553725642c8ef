"""The cluster that a plan is for: described by the user, read from Ray, or found in this process."""

from __future__ import annotations

import copy
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.planner.cluster_file import read_cluster, write_cluster
from mpmd.planner.hardware import NO_LINK, Hardware, check_known, completed
from mpmd.planner.pools import AnyCluster, Pools
from mpmd.planner.presets import PRESETS
from mpmd.simulate import Link
from mpmd.util.shadowing import check_not_shadowed
from mpmd.validation import bool_fault, choice_fault, int_fault, path_fault, raise_faults, str_fault

ENTRY_POINT_GROUP = "mpmd.clusters"
"""The entry points by which installed packages describe clusters, each named after a kind of cluster."""


def _save(cluster: AnyCluster, path: str | os.PathLike[str]) -> None:
    """Writes the cluster to a JSON file, which ``Cluster.load`` and ``mpmd plan --cluster`` read.

    Raises: ``TypeError`` if ``path`` is no path; ``OSError`` as ``open``.
    """
    raise_faults(path_fault("path", path))
    write_cluster(cluster, path)


class HeterogeneousCluster(Pools):
    __doc__ = Pools.__doc__  # which names the attributes

    save = _save


class Cluster(Hardware):
    __doc__ = Hardware.__doc__  # which names the attributes

    save = _save

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster | HeterogeneousCluster:
        """Reads a cluster from a file of ``save``, and checks its numbers as ``Cluster`` does.

        Raises: ``ValueError`` for a file without a cluster, or of another version; ``OSError`` for a path
          without a file; as ``Cluster`` and ``Cluster.of``.
        """
        raise_faults(path_fault("path", path))
        cluster = read_cluster(path)
        pools = [Cluster(**vars(pool)) for pool in cluster.pools]
        return Cluster.of(pools, link=cluster.link) if isinstance(cluster, Pools) else pools[0]

    @staticmethod
    def of(pools: Sequence[Hardware], *, link: Link | None = None) -> HeterogeneousCluster:
        """A cluster of several kinds of devices. Groups are on devices of one kind each.

        ::

            pools = [mpmd.Cluster.preset("h100", nodes=2), mpmd.Cluster.preset("a100-80gb", nodes=4)]
            cluster = mpmd.Cluster.of(pools, link=mpmd.simulate.Link(1e-5, 1e11))

        Args:
          pools: a cluster for each kind, whose ``kind`` is the name of its devices.
          link: between nodes of two pools, shared by the devices of a node; it may be left out for one pool.

        Raises: ``TypeError`` or ``ValueError`` for no pools, for pools without a kind or of the same kind,
          for pools that hold messages in different places, and for a missing link.
        """
        return HeterogeneousCluster(pools, NO_LINK if link is None else link)  # type: ignore[arg-type]

    @staticmethod
    def preset(name: str, *, nodes: int = 1, **given: Any) -> Cluster:
        """Nodes of eight devices of a known kind, slices of TPUs, or nodes of CPUs.

        ::

            cluster = mpmd.Cluster.preset("a100-80gb", nodes=4, node_link=mpmd.simulate.Link(1e-5, 1e11))

        ``mpmd/planner/presets.py`` names the source of each number. A node of TPUs is a slice, whose chips
        ICI joins: 256 chips of ``"v5e"`` and ``"v6e"``, 64 of ``"v5p"``, or as many as ``devices_per_node``
        says. A node of ``"cpu"`` is one device, with all cores of a server with one socket.

        Args:
          name: ``"a100-80gb"``, ``"h100"`` (a board of 500 W), ``"v5e"``, ``"v5p"`` or ``"v6e"``, whose rates
            are fitted to published steps; or ``"a100-40gb"``, ``"h100-sxm"``, ``"h200"``, ``"b200"``,
            ``"l40s"``, ``"rtx4090"`` or ``"cpu"``, whose rates are from datasheets, times
            efficiencies that were measured on other devices.
          given: attributes of the cluster that differ, by name.

        Raises: ``ValueError`` for other names and attributes; as ``Cluster``.
        """
        raise_faults(str_fault("name", name), choice_fault("name", name, PRESETS), int_fault("nodes", nodes))
        check_known(given)
        return Cluster(**{**copy.deepcopy(PRESETS[name]), "nodes": nodes, **given})

    @staticmethod
    def from_ray(
        address: str | None = None,
        *,
        measure: bool = False,
        dtype: str = "float32",
        platform: str | None = None,
        cpus_per_device: float | None = None,
        timeout: float = 60.0,
        **given: Any,
    ) -> Cluster:
        """Describes the Ray cluster at ``address``, or else the cluster that this process is connected to.

        Nodes, devices and memory are read. A device is a GPU where the cluster has GPUs, else a CPU with its
        share of the node's memory.

        Args:
          measure: whether to measure attributes that are not given, in actors on two nodes: rates of matrix
            products, of batched ones and of convolutions while all devices of a node compute, memory
            bandwidth, the floor of a kernel and of a task, collectives between the devices of a node, and
            messages between groups on a node and between nodes. It takes less than a minute.
          dtype: of the measured products: the dtype in which the step computes most.
          platform: ``cpu``, ``cuda`` or another one of JAX; by default as ``mpmd.launch`` chooses.
          cpus_per_device: the CPUs of a node that make a device, on ``cpu``; by default one, or as many as
            the given ``devices_per_node`` have each.
          timeout: seconds to wait for the actors.
          given: attributes that are known, by name; they are not measured.

        Raises: ``ValueError`` when the cluster has no such devices, when its nodes differ and
          ``devices_per_node`` does not say how many to use, or when something is neither given nor
          measured; ``RuntimeError`` when ``mpmd`` is not installed; as ``mpmd.launch``.
        """
        from mpmd.planner.record_steps import record_steps  # which loads JAX

        describe = _entry_point("ray")
        hardware = describe(
            address,
            measure=measure,
            record_steps=record_steps,
            dtype=dtype,
            platform=platform,
            cpus_per_device=cpus_per_device,
            timeout=timeout,
            **given,
        )
        return Cluster(**vars(hardware))

    @staticmethod
    def of_this_process(
        devices: Sequence[Any] | None = None, *, measure: bool = False, dtype: str = "float32", **given: Any
    ) -> Cluster:
        """Describes devices of this process as one node, for an ``MpmdMesh`` on the devices.

        Args:
          devices: of one kind; by default all that JAX shows this process.
          measure, dtype, given: as of ``from_ray``.

        Raises: ``ValueError`` for no devices, for devices of several kinds, and as ``from_ray``.
        """
        import mpmd.planner.local_devices as local_devices  # which loads JAX

        check_known(given)
        raise_faults(bool_fault("measure", measure), local_devices.dtype_fault("dtype", dtype))
        devices = local_devices.checked(devices)
        read = {"nodes": 1, "devices_per_node": len(devices), "memory": local_devices.memory_of(devices)}
        measured = (lambda: local_devices.measured(devices, dtype)) if measure else None
        return Cluster(**vars(completed(read, given, measured)))


def _entry_point(name: str) -> Callable[..., Hardware]:
    entry_points = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not entry_points:
        raise RuntimeError(
            f"no installed package describes clusters of {name!r} (entry points of {ENTRY_POINT_GROUP!r}): "
            "install mpmd, or install it again if that was an earlier version: pip install --editable ."
        )
    check_not_shadowed(entry_points[0].module.partition(".")[0])
    return entry_points[0].load()
