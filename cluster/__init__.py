"""Groups on a Ray cluster: one actor per group, driven by the plans of ``mpmd``."""

from cluster.launch import launch
from cluster.mesh import ClusterMesh

__all__ = ["ClusterMesh", "launch"]
