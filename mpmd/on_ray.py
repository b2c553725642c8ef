"""The names of the package ``cluster`` that a train step's user needs.

This is the only module of ``mpmd`` that imports ``cluster``. It is imported when one of the names is first
used, so that ``import mpmd`` loads no Ray.
"""

from mpmd.util.shadowing import check_not_shadowed

check_not_shadowed("cluster")

from cluster import ClusterMesh, Recovery, launch  # noqa: E402

__all__ = ["ClusterMesh", "Recovery", "launch"]
