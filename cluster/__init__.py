"""Runs the plans of ``mpmd`` on a Ray cluster: one actor for each process of a group.

``describe`` reports the nodes and devices of a cluster to ``mpmd.Cluster.from_ray``.

``launch`` takes the shape of a mesh and returns a ``ClusterMesh``, which steps are compiled for. From then on
programs and step requests enter at ``driver.runtime.RayRuntime``; replies and values leave there as futures.

To read in order: ``launch`` and ``start`` (reserves resources, starts the actors, connects them), ``driver``
(sends requests to the actors, and handles failures), ``process`` (the actor of each process of a group),
``transports`` (messages between groups), ``tcp`` (connections), ``protocol`` (records that both sides
exchange). With ``launch(recovery=...)`` there is also ``recovery`` (replaces groups that have died, and moves
groups).
"""

from cluster.describe import describe
from cluster.launch import launch
from cluster.mesh import ClusterMesh
from cluster.recovery import Recovery

__all__ = ["ClusterMesh", "Recovery", "describe", "launch"]
