"""What groups request from the cluster, and what is said when it is not there."""

import pytest

from cluster.resources import describe_shortage, fitting_cpus


@pytest.mark.parametrize(
    ("nodes", "num_groups", "cpus"),
    [
        ([2], 2, 1),
        ([16, 16], 4, 1),
        ([2], 4, 0.5),
        ([2], 3, 0.5),
        ([1, 1], 3, 0.5),
        ([1], 3, 0.3333),
        ([0, 4], 8, 0.5),
        ([0.5], 1, 0.5),
        ([0], 2, 1),
    ],
)
def test_groups_request_one_cpu_or_a_fraction_that_fits(nodes, num_groups, cpus):
    assert fitting_cpus(nodes, num_groups) == cpus


def test_a_shortage_by_fragmentation_alone_shows_the_nodes():
    nodes = [{"Resources": {"CPU": 3.0}}, {"Resources": {"CPU": 3.0}}]
    assert describe_shortage({"CPU": 2}, 3, {"CPU": 6.0}, nodes).splitlines() == [
        "3 groups of 2 CPU each, every one on one node:",
        "  CPU: 6 asked, 6 available of 6",
        "  nodes: 3 CPU; 3 CPU",
    ]
