"""Groups on nodes that only a network connects."""

import pytest

from cluster.driver.calls.liveness import UNRESPONSIVE_SECONDS
from cluster.tcp.sockets import UNREACHABLE_SECONDS
from tests.nodes import programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_groups_on_nodes_of_their_own_train_as_plain_jax(nodes):
    found = nodes.drive(programs.groups_on_nodes_of_their_own)
    first, second = (nodes.network.address(node) for node in (1, 2))
    assert found["nodes"] in ([first, first, second, second], [second, second, first, first])
    assert found["transports"] == ["network"]
    # Those with the other group and the driver leave the node, and that within a group does not.
    for kinds in found["connections"]:
        assert kinds == ["EncryptedConnection", "EncryptedConnection", "Connection"]
    assert set(found["driver"]) == {"EncryptedConnection"}


def test_a_group_on_two_nodes_trains_as_plain_jax(nodes):
    found = nodes.drive(programs.a_group_on_two_nodes)
    assert found["groups"] == [0, 1, 1]
    assert found["nodes"][1] != found["nodes"][2]
    assert found["transports"] == ["network", "shared_memory"]


def test_the_network_carries_what_the_plan_sends_and_little_more(nodes):
    """That is headers of packets, Ray's own messages, and the replies to the driver, which have no arrays."""
    found = nodes.drive(programs.count_bytes)
    here = found["nodes"].index(nodes.network.address(1))
    planned = [found["planned"][here], found["planned"][1 - here]]
    assert min(planned) > 10 * 2**20
    for sent, messages in zip(found["sent"], planned, strict=True):
        assert messages < sent < 1.1 * messages


def test_a_link_that_is_cut_for_a_moment_delays_a_step_and_one_that_stays_cut_ends_it(nodes):
    found = nodes.drive(programs.cut_a_link, timeout=400)
    assert 5 <= found["seconds until it went on"] < UNREACHABLE_SECONDS / 2
    assert "group 0" in found["error"] and "group 1" in found["error"]
    assert f"the network has not reached it for {UNREACHABLE_SECONDS} s" in found["error"]
    assert found["seconds until the error"] < UNREACHABLE_SECONDS + 30


def test_a_group_whose_node_dies_goes_on_on_another_one(nodes):
    with nodes.started(3):
        found = nodes.drive(programs.a_node_dies, timeout=500)
        dead = nodes.network.node_of(found["before"][1])
        nodes.restart(dead)
    before, after = found["before"], found["after"]
    assert after[0] == before[0]
    assert after[1] not in before
    assert [report[::2] for report in found["recoveries"]] == [[[1], None]]


def test_groups_that_lose_each_other_go_on_when_the_link_heals(nodes):
    found = nodes.drive(programs.a_link_is_cut_and_heals_too_late, timeout=500)
    assert len(found["recoveries"]) == 1
    _, reason, lost = found["recoveries"][0]
    # A chunk of a snapshot that the link holds back keeps pings back, too, which may count first.
    unanswered = f"its process has not answered for {UNRESPONSIVE_SECONDS:g} s"
    assert f"the network has not reached it for {UNREACHABLE_SECONDS} s" in reason or unanswered in reason
    assert lost is None


def test_groups_with_a_slow_link_go_on_and_recover(nodes):
    found = nodes.drive(programs.a_slow_link, timeout=500)
    assert found["before"] == []
    assert [report[::2] for report in found["recoveries"]] == [[[0], None]]
