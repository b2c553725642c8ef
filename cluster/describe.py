"""Describes the Ray cluster for a plan: its nodes and devices, and, if asked for, how fast they are.

``mpmd.Cluster.from_ray`` finds ``describe`` by an entry point, because ``mpmd`` knows no Ray.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ray

from cluster.launch import launch
from cluster.start.environment import actor_environment
from cluster.start.ray_connection import connect_to_ray, default_platform
from cluster.start.resources import ACCELERATOR_TYPE, live_nodes
from cluster.start.shapes import GPU_PLATFORMS
from cluster.transports.choice import NETWORK, SHARED_MEMORY, holding_by
from mpmd.ir.events import Event
from mpmd.memory import Holding
from mpmd.planner.calibrate import calibrate, dtype_fault
from mpmd.planner.calibrate_collectives import collective_rates, group_axes
from mpmd.planner.hardware import Hardware, check_known, completed
from mpmd.validation import Fault, bool_fault, number_fault, raise_faults, shown, str_fault

RecordStepsOn = Callable[[Any, Callable[..., Any], tuple[Any, ...], int], Sequence[Sequence[Event]]]
"""Runs a step, with its arguments, a number of times on a mesh, and returns the events of each run."""

MEASURED_NODES = 2


def describe(
    address: str | None = None,
    *,
    measure: bool = False,
    record_steps: RecordStepsOn | None = None,
    dtype: str = "float32",
    platform: str | None = None,
    cpus_per_device: float | None = None,
    timeout: float = 60.0,
    **given: Any,
) -> Hardware:
    """Describes a Ray cluster, as ``mpmd.Cluster.from_ray`` does, which calls this.

    Args:
      measure: measure attributes that are not given, with ``record_steps``.
      record_steps: called with a mesh, a step, its arguments and a number of runs, runs the step on the mesh
        and returns the events of each run. ``mpmd.Cluster.from_ray`` gives it, because running a step takes
        the compiler, which this package does not know.
      address, dtype, platform, cpus_per_device, timeout, given: as of ``mpmd.Cluster.from_ray``.

    Raises: as ``mpmd.Cluster.from_ray``; ``ValueError`` for ``measure`` without ``record_steps``.
    """
    check_known(given)
    raise_faults(
        str_fault("address", address, optional=True),
        bool_fault("measure", measure),
        _record_steps_fault(measure, record_steps),
        dtype_fault("dtype", dtype),
        str_fault("platform", platform, optional=True),
        number_fault("cpus_per_device", cpus_per_device, above=0, finite=True, optional=True),
        number_fault("timeout", timeout, "a number of seconds", above=0, finite=True),
        title="cluster.describe: ",
    )
    disconnect = connect_to_ray(address)
    try:
        platform = platform or default_platform()
        kind = given.get("kind") or None
        nodes = _find(platform, cpus_per_device, given)
        sizes: dict[str, Any] = {"nodes": nodes.count, "devices_per_node": nodes.devices_per_node}
        sizes["holding"] = _holding(platform, nodes.count)
        if "memory" not in given:
            sizes["memory"] = (
                nodes.memory if platform == "cpu" else _memory_of_device(platform, kind, timeout)
            )
        measured = None
        if record_steps is not None and measure:
            measured = functools.partial(_measured, nodes, record_steps, platform, dtype, kind, timeout)
        return completed(sizes, given, measured)
    finally:
        disconnect()


def _record_steps_fault(measure: Any, record_steps: Any) -> Fault | None:
    if record_steps is not None and not callable(record_steps):
        return TypeError(f"record_steps must be a function, or None, not {shown(record_steps)}")
    if measure is True and record_steps is None:
        return ValueError("measure=True needs record_steps, which mpmd.Cluster.from_ray(measure=True) gives")
    return None


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """``memory`` and ``cpus`` are a device's share, as Ray describes its node."""

    count: int
    devices_per_node: int
    memory: float
    cpus: float


def _find(platform: str, cpus_per_device: float | None, given: Mapping[str, Any]) -> _Nodes:
    each, kind = given.get("devices_per_node"), given.get("kind")
    counts = [
        (_num_devices(node["Resources"], platform, cpus_per_device, each), node["Resources"])
        for node in live_nodes()
        if not kind or kind in _kinds(node["Resources"])
    ]
    texts = [f"{count} devices ({_text(resources)})" for count, resources in counts]
    of_kind = f" of the kind {kind!r}" if kind else ""
    have = f"nodes of the cluster{of_kind}, as devices of {platform!r}: {'; '.join(texts) or 'none'}"
    able = [(count, resources) for count, resources in counts if count >= max(each or 1, 1)]
    if not able:
        raise ValueError(f"no node has {each or 'any'} devices of {platform!r}. {have}")
    kinds = sorted(set[str]().union(*(_kinds(resources) for _, resources in able)))
    if platform != "cpu" and not kind and len(kinds) > 1:
        pools = ", ".join(f"mpmd.Cluster.from_ray(kind={name!r}, ...)" for name in kinds)
        raise ValueError(
            f"the nodes have accelerators of the kinds {', '.join(kinds)}: say which kind=... to describe, "
            f"or make a cluster of them, mpmd.Cluster.of([{pools}], link=...). {have}"
        )
    if each is None and len({count for count, _ in able}) > 1:
        raise ValueError(f"a plan is for equal nodes: say which devices_per_node to use. {have}")
    num_nodes = given.get("nodes", len(able))
    if num_nodes > len(able):
        raise ValueError(f"{num_nodes} nodes are asked for, and {len(able)} have such devices. {have}")
    used = sorted((resources for _, resources in able), key=lambda resources: -resources.get("memory", 0))
    devices = each or able[0][0]
    return _Nodes(
        count=num_nodes,
        devices_per_node=devices,
        memory=min(resources.get("memory", 0) for resources in used[:num_nodes]) / devices,
        cpus=cpus_per_device or min(resources.get("CPU", 0) for resources in used[:num_nodes]) / devices,
    )


def _kinds(resources: Mapping[str, float]) -> set[str]:
    return {name.removeprefix(ACCELERATOR_TYPE) for name in resources if name.startswith(ACCELERATOR_TYPE)}


def _holding(platform: str, nodes: int) -> Holding:
    """The memory that holds messages, by the transport that ``launch`` chooses between most groups."""
    return holding_by(SHARED_MEMORY if nodes == 1 else NETWORK, platform)


def _num_devices(
    resources: Mapping[str, float], platform: str, cpus_per_device: float | None, each: int | None
) -> int:
    if platform in GPU_PLATFORMS:
        return int(resources.get("GPU", 0))
    if platform != "cpu":
        return each or 0  # Ray does not say
    if cpus_per_device is None and each is not None:
        return each if resources.get("CPU", 0) else 0
    return int(resources.get("CPU", 0) / (cpus_per_device or 1))


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name))


def _memory_of_device(platform: str, kind: str | None, timeout: float) -> float:
    """The bytes that the allocator of an accelerator may take, as a process that has one device sees it."""
    environment = actor_environment({}, os.environ.get("XLA_FLAGS", ""), platform, 1, 1)
    task: Any = ray.remote(_bytes_limit)
    gpus = 1 if platform in GPU_PLATFORMS else 0
    options = {"num_cpus": 0, "num_gpus": gpus, "runtime_env": {"env_vars": environment}}
    asked = task.options(**options, **({"accelerator_type": kind} if kind else {})).remote()
    try:
        limit = ray.get(asked, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(asked)
        raise RuntimeError(f"no device of {platform!r} was free within {timeout:g} s") from None
    if limit is None:
        raise ValueError(f"JAX does not say how much memory a device of {platform!r} has: give memory=...")
    return float(limit)


def _bytes_limit() -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def _measured(
    nodes: _Nodes,
    record_steps: RecordStepsOn,
    platform: str,
    dtype: str,
    kind: str | None,
    timeout: float,
) -> dict[str, Any]:
    of_node = nodes.devices_per_node
    launched = functools.partial(launch, platform=platform, accelerator_types=kind, timeout=timeout)
    cpus = nodes.cpus if platform == "cpu" else None
    with launched(
        groups=[{"device": 1}] * (min(nodes.count, MEASURED_NODES) * of_node), cpus_per_group=cpus
    ) as mesh:
        node_ids = [group.node_id for group in mesh.groups]
        known = calibrate(functools.partial(record_steps, mesh), node_ids, dtype)
    if of_node == 1:
        return known
    axes = group_axes(of_node)
    with launched(groups=[axes], cpus_per_group=cpus and of_node * cpus) as mesh:
        collectives = collective_rates(functools.partial(record_steps, mesh), axes)
    return known | {"rates": known["rates"] | collectives}
