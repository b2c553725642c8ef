"""The processes of groups that differ in their numbers of processes alone."""

from collections.abc import Sequence

from cluster.protocol import endpoint
from mpmd.ir.reshard import GroupShape


def endpoints(num_processes: Sequence[int]) -> tuple[endpoint.Endpoint, ...]:
    """The processes of groups with these numbers of processes."""
    return endpoint.endpoints([GroupShape({"stage": 1}, count) for count in num_processes])
