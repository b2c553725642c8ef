"""The hardware of a cluster: devices, their speed and memory, and the links between them."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

import numpy as np

from mpmd.memory import Holding
from mpmd.planner.curves import (
    Amount,
    CollectiveKind,
    Curve,
    ProductKind,
    ProductWork,
    rates_faults,
    without,
)
from mpmd.simulate import Link
from mpmd.validation import (
    Fault,
    Rule,
    bool_fault,
    choice_fault,
    device_count_fault,
    faults_of,
    finite_fault,
    int_fault,
    number_fault,
    raise_faults,
    refusing,
    str_fault,
    type_fault,
)

_TITLE = "no cluster is like this:\n"

_NOT_MEASURED = frozenset(
    {
        "holding",
        "kind",
        "merges_all_reduces",
        "overlaps_gathers",
        "accumulates_products",
        "flash_attention",
    }
)

NO_LINK = Link()
"""The link of a cluster between devices that it does not have: nothing depends on its numbers."""


def _holding_fault(name: str, value: Any) -> Fault | None:
    is_holding = isinstance(value, Holding)
    return None if is_holding else choice_fault(name, value, [holding.value for holding in Holding])


def link_fault(name: str, value: Any) -> Fault | None:
    what = "an mpmd.simulate.Link of seconds and bytes per second, such as Link(1e-6, 1e10)"
    return type_fault(name, value, Link, what) or finite_fault(f"the latency of {name}", value.latency)


ALONE_OF_IS_GONE = "alone_of is gone: leave it out, because alone is the factor of all kinds of work"


def _above_0(unit: str) -> Rule:
    return functools.partial(number_fault, what=f"a number of {unit}", above=0)


def _at_least(least: float) -> Rule:
    return functools.partial(number_fault, least=least)


_Count = Annotated[int, int_fault]
_Seconds = Annotated[float, _at_least(0), finite_fault]
_Factor = Annotated[float, _at_least(1), finite_fault]
_Flag = Annotated[bool, bool_fault]
_LinkBetween = Annotated[Link, link_fault]


@refusing(alone_of=ALONE_OF_IS_GONE)
@dataclasses.dataclass(frozen=True)
class Hardware:
    """Equal devices on equal nodes.

    Attributes:
      nodes, devices_per_node: how many there are.
      memory: bytes that a device has for a step.
      flops: operations per second of a device, in matrix products of the step's dtype, while all compute.
      memory_bandwidth: bytes per second that a device reads or writes of its memory, while all do.
      device_link: between devices of a node, each with its own; seconds and bytes per second. It may be left
        out where a node has one device.
      node_link: between nodes, shared by the devices of a node; seconds and bytes per second. It may be left
        out where there is one node.
      task_overhead: seconds that a task takes beside its computation.
      holding: where messages between groups are until they are used; as text, too, such as ``"receiver"``.
        With ``receiver`` on one node, groups are taken to be in one process, whose threads they share.
      alone: how many times faster a device is while no other device of its node computes: more than 1 where
        they share cores, as CPU devices of one process do, and of more groups than there are cores.
      rates: curves of products by kind and dtype, such as ``{"product bfloat16": Curve(2.5e14, 1e9)}``. The
        kinds are ``product``, ``batched_product`` and ``convolution``. All else has the constant ``flops``.
        Also curves of collectives on a node by kind and number of devices, ``all_reduce 8`` and
        ``all_gather 8``; other numbers of devices are taken from the nearest one. A kind without a curve has
        the time of a ring of ``device_link``.
      kernel_floor: seconds from the start of a kernel to the start of the next, if both are small.
      collective_floor: seconds of an exchange between devices of a group, beside the time of its messages.
      merges_all_reduces: whether all-reduces whose results are added are one, as XLA has it on accelerators.
      overlaps_gathers: whether weights are gathered, and gradients scattered, while devices compute, as XLA
        has it on accelerators.
      accumulates_products: whether a product adds its result to an accumulator itself, as the libraries of
        accelerators have it. Otherwise adding a gradient takes as long as one access to its memory.
      flash_attention: whether the step runs with a kernel of flash attention where it is planned with
        ``jax.nn.dot_product_attention``: with ``implementation="cudnn"``, which needs a GPU to be traced. The
        profile then has its operations, with 1.25 of the equations' in the backward, and no scores in memory.
        JAX runs the plain products unless it is told otherwise, so this is ``False`` by default.
      kind: the name of the devices, as Ray names accelerator types: ``"H100"``. Pools of a cluster of several
        kinds need one.

    Raises ``TypeError`` or ``ValueError`` for impossible values, such as memory that is no number, or no
    devices.
    """

    nodes: _Count
    devices_per_node: _Count
    memory: Annotated[float, _above_0("bytes")]
    flops: Annotated[float, _above_0("operations per second"), finite_fault]
    memory_bandwidth: Annotated[float, _above_0("bytes per second"), finite_fault]
    device_link: _LinkBetween = NO_LINK
    node_link: _LinkBetween = NO_LINK
    task_overhead: _Seconds = 0.0
    alone: _Factor = 1.0
    holding: Annotated[Holding, _holding_fault] = Holding.RECEIVER
    rates: Annotated[Mapping[str, Curve], rates_faults] = dataclasses.field(default_factory=dict, hash=False)
    kernel_floor: _Seconds = 0.0
    collective_floor: _Seconds = 0.0
    merges_all_reduces: _Flag = False
    overlaps_gathers: _Flag = False
    accumulates_products: _Flag = False
    flash_attention: _Flag = False
    kind: Annotated[str, str_fault] = ""

    def __post_init__(self) -> None:
        if isinstance(self.holding, str) and self.holding in [holding.value for holding in Holding]:
            object.__setattr__(self, "holding", Holding(self.holding))
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        raise_faults(*faults_of(Hardware, values), title=_TITLE)
        raise_faults(
            device_count_fault(self.nodes * self.devices_per_node),
            *(
                ValueError(
                    f"{name} must be given where there are {number} {between}, as an mpmd.simulate.Link of "
                    "seconds and bytes per second, such as Link(1e-6, 1e10)"
                )
                for name, number, between in (
                    ("device_link", self.devices_per_node, "devices on a node"),
                    ("node_link", self.nodes, "nodes"),
                )
                if number > 1 and getattr(self, name) is NO_LINK
            ),
            title=_TITLE,
        )

    @property
    def pools(self) -> tuple[Hardware, ...]:
        """The hardware itself, as the only pool of a cluster of one kind."""
        return (self,)

    def pool(self, name: str) -> Hardware:
        """The devices that groups in a pool have; there is one pool, whose name is empty."""
        assert not name, f"a cluster of one kind has no pool {name!r}"
        return self

    @property
    def pool_names(self) -> tuple[str, ...]:
        """The names of the pools, as submeshes have them."""
        return ("",)

    @property
    def num_devices(self) -> int:
        """The number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    def with_memory(self, share: float) -> Self:
        """The cluster if devices had a share of their memory."""
        return dataclasses.replace(self, memory=self.memory * share)

    def with_nodes(self, factor: int) -> Self:
        """The cluster with ``factor`` times the nodes; a missing ``node_link`` becomes one without costs."""
        node_link = Link() if self.node_link is NO_LINK else self.node_link
        return dataclasses.replace(self, nodes=factor * self.nodes, node_link=node_link)

    def part(self, num_devices: int) -> Self:
        """A part of the cluster, to plan one of several models for: whole nodes, or devices of one node.

        Raises: ``ValueError`` for more devices than there are, and for a number that is neither.
        """
        of_node, most = self.devices_per_node, self.nodes * self.devices_per_node
        raise_faults(int_fault("num_devices", num_devices, most=most))
        if num_devices <= of_node:
            return dataclasses.replace(self, nodes=1, devices_per_node=num_devices)
        if num_devices % of_node:
            raise ValueError(
                f"num_devices={num_devices} are not whole nodes, of {of_node} devices each: take a multiple "
                f"of {of_node}, or at most {of_node}"
            )
        return dataclasses.replace(self, nodes=num_devices // of_node)

    def seconds(self, operations: Amount, nbytes_of_products: Amount, nbytes_beside: Amount) -> Amount:
        """The seconds of a task on a device, without exchanges with other devices.

        Products take the longer of computing and of reading and writing memory (the roofline of Williams et
        al., "Roofline: An Insightful Visual Performance Model", 2009); then the rest of the task reads and
        writes memory, such as the addition of gradients to accumulators.
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
        of_products, beside = seconds_by_part(self, operations, nbytes_of_products, nbytes_beside)
        return of_products + beside


def seconds_by_part(
    cluster: Hardware,
    operations: Amount,
    nbytes_of_products: Amount,
    nbytes_beside: Amount,
    products: Mapping[str, ProductWork] = types.MappingProxyType({}),
    kernels: Amount | float = 0.0,
) -> tuple[Amount, Amount]:
    """Returns the seconds of a task's products, and the seconds of the rest of the task.

    Args:
      operations: the operations of all kernels.
      products: the products among them, by the names of ``rates``.
      kernels: the number of all kernels. While devices compute, further ones are started, so a task takes
        the longer of computing and of starting its kernels; the excess over computing counts beside products.
    """
    computing = (operations - sum(work.operations for work in products.values())) / cluster.flops
    for name, work in products.items():
        computing = computing + cluster.rates.get(name, Curve(cluster.flops)).seconds(*work)
    of_products = np.maximum(computing, nbytes_of_products / cluster.memory_bandwidth)
    beside = nbytes_beside / cluster.memory_bandwidth
    return of_products, np.maximum(beside, kernels * cluster.kernel_floor - of_products)


def accesses_to_add(cluster: Hardware) -> float:
    """The accesses to memory for each byte of a gradient that is added to its accumulator.

    On CPUs additions have taken about one at most: a sum that overwrites its accumulator saves the first
    writes to new memory.
    """
    return 0.0 if cluster.accumulates_products else 1.0


def check_known(known: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for names that are no attributes of a cluster, and as ``Hardware`` for values."""
    fields = [field.name for field in dataclasses.fields(Hardware)]
    if "alone_of" in known:
        raise ValueError(ALONE_OF_IS_GONE)
    if unknown := [name for name in known if name not in fields]:
        raise ValueError(f"a cluster has no {', '.join(unknown)}; it has {', '.join(fields)}")
    raise_faults(*faults_of(Hardware, known), title=_TITLE)


def completed(
    read: Mapping[str, Any], given: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]] | None
) -> Hardware:
    """The hardware with some attributes that were read, some that the user gives, and the rest measured.

    Args:
      read: the attributes that were read.
      given: the attributes from the user, which take precedence.
      measure: measures further attributes; ``None`` if they may not be measured.

    Raises: ``ValueError`` for given names that are no attributes, and for attributes that remain unknown.
    """
    check_known(given)
    fields = {field.name: field for field in dataclasses.fields(Hardware)}
    known = {**read, **given}
    needed = [name for name in _needed(fields, known) if name not in known]
    if measure is not None and not {*fields} - _NOT_MEASURED <= {*known}:
        measured = measure()
        known = {**measured, "rates": _rates_beside(measured.get("rates", {}), given), **known}
        needed = [name for name in needed if name not in known]
    if needed:
        why = "have them measured, measure=True" if measure is None else "have no other work on the cluster"
        raise ValueError(
            f"nothing says the cluster's {', '.join(needed)}: give them, as in {needed[0]}=..., or {why}"
        )
    return Hardware(**known)


def _rates_beside(rates: Mapping[str, Curve], given: Mapping[str, Any]) -> dict[str, Curve]:
    without_products = without(rates, ProductKind) if "flops" in given else rates
    return without(without_products, CollectiveKind) if "device_link" in given else dict(without_products)


def has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _needed(fields: Mapping[str, dataclasses.Field[Any]], known: Mapping[str, Any]) -> list[str]:
    unused = {field.name for field in fields.values() if has_default(field)} - {"device_link", "node_link"}
    if known["devices_per_node"] == 1:
        unused.add("device_link")
    if known["nodes"] == 1:
        unused.add("node_link")
    return [name for name in fields if name not in unused]
