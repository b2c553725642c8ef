"""The groups of a cluster as the compiler sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from cluster.driver import RayRuntime
from cluster.info import GroupInfo


class ClusterMesh:
    """Running groups, one actor each; made by ``cluster.launch``. Implements ``mpmd.mesh.GroupMesh``.

    ``close``, or leaving ``with``, ends the actors and gives their resources back; so do dropping the mesh
    with all that uses it, and the exit of the interpreter.

    Args:
      mesh_shape: axis names and sizes of the whole mesh.
      mpmd_axis_name: the axis along which the groups are.
      platform: the groups' devices.
      runtime: the running groups.
      groups: where each of them lives.
      transports: how each pair of groups, lower index first, exchanges messages.
      seconds: how long it took to start, by phase: ``ray``, to connect to Ray or to start it; ``resources``,
        until they were reserved; ``actors``, until their processes had JAX ready; ``transports``, until
        they were connected with one another and with the driver.
      on_close: called after the groups have ended, once.
    """

    def __init__(
        self,
        mesh_shape: Mapping[str, int],
        mpmd_axis_name: str,
        platform: str,
        runtime: RayRuntime,
        groups: Sequence[GroupInfo],
        transports: Mapping[tuple[int, int], str],
        seconds: Mapping[str, float],
        on_close: Callable[[], None],
    ):
        self.mesh_shape = dict(mesh_shape)
        self.mpmd_axis_name = mpmd_axis_name
        self.platform = platform
        self.runtime = runtime
        self.groups = tuple(groups)
        self.transports = dict(transports)
        self.seconds = dict(seconds)
        self._on_close: Callable[[], None] | None = on_close

    @property
    def mpmd_dim(self) -> int:
        return self.mesh_shape[self.mpmd_axis_name]

    @property
    def abstract_submesh(self) -> jax.sharding.AbstractMesh:
        return abstract_submesh(self.mesh_shape, self.mpmd_axis_name)

    def close(self) -> None:
        """Ends the actors; what is outstanding fails. Disconnects Ray if ``launch`` connected it."""
        self.runtime.close()
        on_close, self._on_close = self._on_close, None
        if on_close:
            on_close()

    def __enter__(self) -> ClusterMesh:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        nodes = len({group.node_id for group in self.groups})
        state = "" if self._on_close else ", closed"
        return (
            f"ClusterMesh({self.mesh_shape}, mpmd_axis={self.mpmd_axis_name!r}, "
            f"platform={self.platform!r}, nodes={nodes}{state})"
        )


def abstract_submesh(mesh_shape: Mapping[str, int], mpmd_axis: str) -> jax.sharding.AbstractMesh:
    """The shape of a group's submesh: all the axes, the mpmd axis with size 1."""
    shape = {**mesh_shape, mpmd_axis: 1}
    return jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
