"""Which processes share the devices of others."""

import pytest

from cluster.protocol.process_info import ProcessInfo
from cluster.recovery.allocations import choose_hosts
from cluster.start.environment import visible_devices


def hosts(*nodes, num_devices=1):
    devices = tuple(f"device {index}" for index in range(num_devices))
    return {i: ProcessInfo(i, 0, "host", node, 100 + i, devices, ()) for i, node in enumerate(nodes)}


@pytest.mark.parametrize(
    ("nodes", "shares_with", "guests", "expected"),
    [
        ("abc", {}, [7, 8, 9, 10], {7: 0, 8: 1, 9: 2, 10: 0}),
        ("abc", {6: 0, 5: 1}, [7], {7: 2}),
        ("aab", {6: 0}, [7], {7: 2}),  # the node counts before the process
        ("aa", {6: 0}, [7], {7: 1}),
        ("ab", {6: 5}, [7], {7: 0}),  # who shares with one that is gone does not count
    ],
)
def test_those_with_the_fewest_guests_get_the_next(nodes, shares_with, guests, expected):
    assert choose_hosts(dict.fromkeys(guests, 1), hosts(*nodes), shares_with) == expected


def test_a_host_has_as_many_devices_as_a_guest_needs():
    few_and_many = {0: hosts("a")[0], 1: hosts("a", "b", num_devices=4)[1]}
    assert choose_hosts({7: 2, 8: 2}, few_and_many, {}) == {7: 1, 8: 1}
    with pytest.raises(LookupError, match="none of the processes that are left has 8 devices to share"):
        choose_hosts({7: 8}, few_and_many, {})


def test_a_guest_sees_the_devices_of_its_host():
    assert visible_devices("cuda", ("2", "3"))["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert visible_devices("rocm", ("0",))["HIP_VISIBLE_DEVICES"] == "0"
    assert visible_devices("cpu", ()) == {}
