"""What a plan knows of a cluster: devices, their speed and memory, and the links between them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mpmd.memory import Holding
from mpmd.simulate import Link
from mpmd.validation import (
    Fault,
    bool_fault,
    choice_fault,
    device_count_fault,
    int_fault,
    number_fault,
    raise_faults,
    type_fault,
)

ENTRY_POINT_GROUP = "mpmd.clusters"
"""Packages say in their installation, under the name of a kind of cluster, what describes one."""

_UNITS = {"memory": "bytes", "flops": "operations per second", "memory_bandwidth": "bytes per second"}
_LEAST = {"task_overhead": 0, "alone": 1}

Amount = TypeVar("Amount", float, np.ndarray)


_TITLE = "no cluster is like this:\n"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal devices on equal nodes.

    Attributes:
      nodes, devices_per_node: how many there are.
      memory: bytes that a device has for a step.
      flops: operations per second of a device, in matrix products of the step's dtype, while all compute.
      memory_bandwidth: bytes per second that a device reads or writes of its memory, while all do.
      device_link: between devices of a node, each with its own; seconds and bytes per second.
      node_link: between nodes, shared by the devices of a node; seconds and bytes per second.
      task_overhead: seconds that a task takes beside what it computes.
      holding: where messages between groups are until they are used; as text, too, such as ``"receiver"``.
      alone: how many times faster a device is while the others of its node do not compute: more than 1 where
        they share cores, as the CPU devices of a process, and those of more groups than there are cores.

    Raises ``TypeError`` or ``ValueError`` for what no cluster has, such as memory that is no number, or no
    devices.
    """

    nodes: int
    devices_per_node: int
    memory: float
    flops: float
    memory_bandwidth: float
    device_link: Link
    node_link: Link
    task_overhead: float = 0.0
    alone: float = 1.0
    holding: Holding = Holding.RECEIVER

    def __post_init__(self) -> None:
        if isinstance(self.holding, str) and self.holding in [holding.value for holding in Holding]:
            object.__setattr__(self, "holding", Holding(self.holding))
        faults = (_fault_of(field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        raise_faults(*faults, title=_TITLE)
        raise_faults(device_count_fault(self.nodes * self.devices_per_node), title=_TITLE)

    def seconds(self, operations: Amount, nbytes_of_products: Amount, nbytes_beside: Amount) -> Amount:
        """What a device takes for a task, without what it exchanges.

        For products the longer of computing and of reading and writing memory (the roofline of Williams et
        al., "Roofline: An Insightful Visual Performance Model", 2009), then what else reads and writes
        memory, as to add gradients to accumulators.
        """
        raise_faults(
            *(
                type_fault(name, value, numbers.Real | np.ndarray, "a number, or an array of them")
                for name, value in (
                    ("operations", operations),
                    ("nbytes_of_products", nbytes_of_products),
                    ("nbytes_beside", nbytes_beside),
                )
            )
        )
        of_products = np.maximum(operations / self.flops, nbytes_of_products / self.memory_bandwidth)
        return of_products + nbytes_beside / self.memory_bandwidth

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
        """Describes a Ray cluster: the one that this process is connected to, or the one at ``address``.

        Nodes, devices and memory are read. A device is a GPU where the cluster has GPUs, else a CPU with its
        share of the node's memory.

        Args:
          measure: measure what is not given, in actors on two nodes, in seconds: rates of matrix products
            while all devices of a node compute, memory bandwidth, what a task takes beside, and messages
            between groups on a node and between nodes.
          dtype: of these matrix products.
          platform: ``cpu``, ``cuda`` or another one of JAX; by default as ``cluster.launch`` chooses.
          cpus_per_device: the CPUs of a node that make a device, on ``cpu``; by default one, or as many as
            the given ``devices_per_node`` have each.
          timeout: seconds to wait for the actors.
          given: what is known already, by the names of the attributes; it is not measured.

        Raises: ``ValueError`` when the cluster has no such devices, when its nodes differ and
          ``devices_per_node`` does not say what to use of them, or when something is neither given nor
          measured; ``RuntimeError`` when ``mpmd`` is not installed; as ``cluster.launch``.
        """
        describe = _entry_point("ray")
        return describe(
            address,
            measure=measure,
            dtype=dtype,
            platform=platform,
            cpus_per_device=cpus_per_device,
            timeout=timeout,
            **given,
        )

    @staticmethod
    def of_this_process(
        devices: Sequence[Any] | None = None, *, measure: bool = False, dtype: str = "float32", **given: Any
    ) -> Cluster:
        """Describes devices of this process, for an ``MpmdMesh`` of them: one node.

        Args:
          devices: of one kind; by default all that JAX shows this process.
          measure, dtype, given: as of ``from_ray``.

        Raises: ``ValueError`` for no devices, for several kinds of them, and as ``from_ray``.
        """
        import mpmd.planner.here as here  # which loads JAX

        check_known(given)
        raise_faults(bool_fault("measure", measure), here.dtype_fault("dtype", dtype))
        devices = here.checked(devices)
        found = {"nodes": 1, "devices_per_node": len(devices), "memory": here.memory_of(devices)}
        return completed(found, given, (lambda: here.measured(devices, dtype)) if measure else None)


def _fault_of(name: str, value: Any) -> Fault | None:
    """The fault of the value of an attribute of a cluster."""
    if name in ("nodes", "devices_per_node"):
        return int_fault(name, value)
    if name in _UNITS:
        return number_fault(name, value, f"a number of {_UNITS[name]}", above=0)
    if name in ("device_link", "node_link"):
        what = "an mpmd.simulate.Link of seconds and bytes per second, such as Link(1e-6, 1e10)"
        return type_fault(name, value, Link, what)
    if name == "holding":
        is_holding = isinstance(value, Holding)
        return None if is_holding else choice_fault(name, value, [holding.value for holding in Holding])
    return number_fault(name, value, least=_LEAST[name])


def check_known(known: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` or ``ValueError`` for what is given of a cluster, and is no attribute of one."""
    fields = [field.name for field in dataclasses.fields(Cluster)]
    if unknown := [name for name in known if name not in fields]:
        raise ValueError(f"a cluster has no {', '.join(unknown)}; it has {', '.join(fields)}")
    faults = (_fault_of(name, value) for name, value in known.items())
    raise_faults(*faults, title=_TITLE)


def completed(
    found: Mapping[str, Any], given: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]] | None
) -> Cluster:
    """The cluster of which something was found and something is given, which takes precedence.

    Args:
      measure: measures the rest; ``None`` if it may not be measured.

    Raises: ``ValueError`` for what is given and is no attribute, and for what nobody knows.
    """
    check_known(given)
    fields = {field.name: field for field in dataclasses.fields(Cluster)}
    known = {**found, **given}
    needed = [name for name in _needed(fields, known) if name not in known]
    if measure is not None and not {*fields} - {"holding"} <= {*known}:
        known = {**measure(), **known}
        needed = [name for name in needed if name not in known]
    if needed:
        why = "have them measured, measure=True" if measure is None else "have no other work on the cluster"
        raise ValueError(
            f"nothing says the cluster's {', '.join(needed)}: give them, as in {needed[0]}=..., or {why}"
        )
    # Of a link that there is none of, nothing depends on the number.
    links = {name: known.get(name, Link()) for name in ("device_link", "node_link")}
    return Cluster(**{**known, **links})


def _needed(fields: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    """The attributes without which nothing can be said of a cluster of so many devices."""
    unused = {"task_overhead", "alone", "holding"}
    if known["devices_per_node"] == 1:
        unused.add("device_link")
    if known["nodes"] == 1:
        unused.add("node_link")
    return [name for name in fields if name not in unused]


def _entry_point(name: str) -> Callable[..., Cluster]:
    found = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        raise RuntimeError(
            f"no installed package describes clusters of {name!r} (entry points of {ENTRY_POINT_GROUP!r}): "
            "install mpmd, or install it again if that was an earlier version: pip install --editable ."
        )
    return found[0].load()
