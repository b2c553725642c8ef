"""Groups on nodes of the accelerator types that they ask for, on a Ray of its own."""

import pytest

from tests.support.subprocesses import run_code

SECONDS = 280

TWO_KINDS = """
import ray
from ray.cluster_utils import Cluster
import cluster, mpmd

started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
small = dict(num_cpus=1, object_store_memory=10**8)
slow = started.add_node(**small, resources={"accelerator_type:SLOW": 1})
fast = started.add_node(**small, resources={"accelerator_type:FAST": 1})
ray.init(address=started.address)
numbers = dict(flops=1e9, memory_bandwidth=1e9, devices_per_node=1)
pools = [mpmd.Cluster.from_ray(kind=kind, **numbers) for kind in ("FAST", "SLOW")]
assert [pool.nodes for pool in pools] == [1, 1], pools
types = ["FAST", "SLOW"]
for _ in range(2):
    options = {"cpus_per_group": 1, "accelerator_types": types, "timeout": 120}
    with cluster.launch({"stage": 2}, "stage", **options) as mesh:
        nodes = {"FAST": fast.node_id, "SLOW": slow.node_id}
        assert [group.node_id for group in mesh.groups] == [nodes[name] for name in types]
    types.reverse()
try:
    cluster.launch({"stage": 1}, "stage", accelerator_types="OTHER", timeout=3)
except RuntimeError as error:
    assert "accelerator_type:OTHER: 0.001 asked, 0 available of 0" in str(error), error
else:
    raise AssertionError("no node has that type")
ray.shutdown()
started.shutdown()
print("done")
"""


@pytest.mark.slow
def test_groups_are_on_nodes_of_their_accelerator_type():
    assert "done" in run_code(TWO_KINDS, seconds=SECONDS)[0]
