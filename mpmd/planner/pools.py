"""Clusters of several kinds of devices: a pool of equal nodes for each kind, and the links between pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self

from mpmd.memory import Holding
from mpmd.planner.hardware import NO_LINK, Hardware, link_fault
from mpmd.simulate import Link
from mpmd.validation import Fault, device_count_fault, faults_of, raise_faults, sequence_fault, type_fault

_TITLE = "no cluster is like this:\n"


def _pools_faults(name: str, pools: Any) -> Iterator[Fault | None]:
    what = "clusters of one kind each, such as [mpmd.Cluster(kind='H100', ...), ...]"
    yield sequence_fault(name, pools, what)
    for number, pool in enumerate(pools if isinstance(pools, Sequence) else ()):
        yield type_fault(f"{name}[{number}]", pool, Hardware, "an mpmd.Cluster of one kind of devices")


@dataclasses.dataclass(frozen=True)
class Pools:
    """Devices of several kinds, each kind on equal nodes. A group lies in one pool.

    Attributes:
      pools: the devices of each kind; ``kind`` is the name of the pool.
      link: between nodes of two pools, shared by the devices of a node; seconds and bytes per second. It may
        be left out where there is one pool.

    Raises ``TypeError`` or ``ValueError`` for no pools, for pools without a kind or of the same kind, for
    pools that hold messages in different places or differ in ``flash_attention``, and for a missing link.
    """

    pools: Annotated[tuple[Hardware, ...], _pools_faults]
    link: Annotated[Link, link_fault] = NO_LINK

    def __post_init__(self) -> None:
        raise_faults(*faults_of(Pools, vars(self)), title=_TITLE)
        object.__setattr__(self, "pools", tuple(self.pools))
        raise_faults(*_faults(self.pools, self.link), title=_TITLE)

    def pool(self, name: str) -> Hardware:
        """The devices that groups in a pool have."""
        return next(pool for pool in self.pools if pool.kind == name)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """The names of the pools, as submeshes have them."""
        return tuple(pool.kind for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """The number of devices of all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def holding(self) -> Holding:
        """The memory that holds messages, which is the same in all pools."""
        return self.pools[0].holding

    @property
    def flash_attention(self) -> bool:
        """Whether ``jax.nn.dot_product_attention`` is a kernel, which is the same in all pools."""
        return self.pools[0].flash_attention

    def with_memory(self, share: float) -> Self:
        """The cluster if devices had a share of their memory."""
        return dataclasses.replace(self, pools=tuple(pool.with_memory(share) for pool in self.pools))

    def with_nodes(self, factor: int) -> Self:
        """The cluster with ``factor`` times the nodes in each pool."""
        return dataclasses.replace(self, pools=tuple(pool.with_nodes(factor) for pool in self.pools))


AnyCluster = Hardware | Pools


def _faults(pools: Sequence[Hardware], link: Link) -> Iterator[Fault | None]:
    if not pools:
        yield ValueError("pools is empty: give a cluster for each kind of devices")
        return
    for number, pool in enumerate(pools):
        first = next(index for index, other in enumerate(pools) if other.kind == pool.kind)
        if not pool.kind:
            yield ValueError(
                f"pools[{number}] needs a kind, the name of its devices, as Ray names accelerator types: "
                "kind='H100'"
            )
        elif first < number:
            yield ValueError(
                f"pools[{number}] and pools[{first}] are both of the kind {pool.kind!r}: give the equal "
                "nodes of a kind as one pool"
            )
    if len(pools) > 1 and link is NO_LINK:
        yield ValueError(
            f"link must be given between {len(pools)} pools, as an mpmd.simulate.Link of seconds and bytes "
            "per second, such as Link(1e-5, 1e10)"
        )
    if len({pool.holding for pool in pools}) > 1:
        places = ", ".join(f"{pool.kind} {pool.holding.value!r}" for pool in pools)
        yield ValueError(f"pools hold messages in different places ({places}): give all the same holding=...")
    if len({pool.flash_attention for pool in pools}) > 1:
        switches = ", ".join(f"{pool.kind} {pool.flash_attention}" for pool in pools)
        yield ValueError(
            f"one step runs in all pools, with one attention ({switches}): give all the same flash_attention"
        )
    yield device_count_fault(sum(pool.num_devices for pool in pools))
