"""Which transport connects which groups."""

import pytest

from cluster.protocol.process_info import ProcessInfo
from cluster.transports.choice import choose, encryption_fault, holdings, supported
from mpmd.memory import Holding

ALL = ("shared_memory", "network", "device", "object_store")


def group(mpmd_idx, node, transports=ALL, rank=0):
    return ProcessInfo(mpmd_idx, rank, "10.0.0.1", node, 1, (), transports)


def test_each_pair_of_groups_gets_the_best_that_both_can_use():
    groups = [group(0, "a"), group(1, "a"), group(2, "b"), group(3, "b", ("object_store",))]
    assert choose("auto", groups) == {
        (0, 1): "shared_memory",
        (0, 2): "network",
        (1, 2): "network",
        (0, 3): "object_store",
        (1, 3): "object_store",
        (2, 3): "object_store",
    }


def test_a_transport_that_cannot_connect_all_groups_is_refused_with_all_such_pairs():
    with pytest.raises(ValueError, match="transport 'shared_memory' does not connect all groups") as caught:
        choose("shared_memory", [group(0, "a"), group(1, "a"), group(2, "b")])
    assert "groups 0 and 2 can use network, device, object_store" in str(caught.value)
    assert "groups 1 and 2" in str(caught.value)
    assert "groups 0 and 1" not in str(caught.value)


def test_processes_of_a_group_need_no_transport():
    processes = [group(0, "a"), group(0, "b", rank=1), group(1, "b")]
    assert choose("auto", processes) == {(0, 2): "network", (1, 2): "shared_memory"}


def test_jax_has_transfers_for_some_platforms():
    for platform in ("cpu", "cuda"):
        assert supported(platform) == ("shared_memory", "network", "device", "object_store")
    assert supported("unheard of") == ("shared_memory", "network", "object_store")


def test_a_port_that_strangers_can_kill_is_opened_only_by_name():
    processes = [group(0, "a"), group(1, "b")]
    assert choose("auto", processes) == {(0, 1): "network"}
    assert choose("device", processes) == {(0, 1): "device"}
    alone = ("device", "object_store")
    assert choose("auto", [group(0, "a", alone), group(1, "b", alone)]) == {(0, 1): "object_store"}


def test_messages_are_held_as_the_transport_of_the_edge_holds_them():
    groups = [group(0, "a"), group(1, "a"), group(2, "b", ("object_store",))]
    assert holdings(choose("auto", [groups[0], group(1, "b")]), groups, "cpu")[0, 1] == Holding.KEPT
    chosen = choose("auto", groups)
    assert holdings(chosen, groups, "cpu") == {
        (0, 1): Holding.SLOTS,
        (1, 0): Holding.SLOTS,
        (0, 2): Holding.ELSEWHERE,
        (2, 0): Holding.ELSEWHERE,
        (1, 2): Holding.ELSEWHERE,
        (2, 1): Holding.ELSEWHERE,
    }
    assert holdings(chosen, groups, "cuda")[0, 1] == Holding.ELSEWHERE  # slots are not in the device's memory


def test_of_several_transports_between_groups_the_one_counts_that_takes_most_memory():
    processes = [group(0, "a"), group(0, "b", rank=1), group(1, "b")]
    assert holdings(choose("auto", processes), processes, "cpu")[0, 1] == Holding.SLOTS


@pytest.mark.parametrize("transport", ["device", "object_store"])
def test_encryption_that_a_transport_does_not_have_is_not_promised(transport):
    assert f"transport '{transport}' does not encrypt" in str(encryption_fault(True, transport))
    for encryption in (None, False):
        assert encryption_fault(encryption, transport) is None
    assert encryption_fault(True, "auto") is None
    assert "must be True, False or None, not 'yes'" in str(encryption_fault("yes", "auto"))
