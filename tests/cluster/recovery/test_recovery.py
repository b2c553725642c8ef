"""The policy of recovery: when to copy, who keeps copies, and what a report says."""

import numpy as np
import pytest

import cluster
from cluster.protocol.process_info import ProcessInfo
from cluster.recovery import policy
from cluster.recovery.copies import MissingCopy, choose_keepers, missing_copies
from cluster.recovery.policy import Recovery
from cluster.recovery.report import DRAINED, SHRUNK, RecoveryReport
from mpmd.runtime.requests import StepReply, StepRequest
from tests.support.counting_journal import CountingJournal


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be a whole number of at least 1, not 0"),
        (
            {"share_after": -1},
            ValueError,
            "share_after must be a finite number of seconds of at least 0, or N",
        ),
        ({"share_after": float("inf")}, ValueError, "share_after must be"),
        ({"max_failures": 1.5, "spares": -1}, TypeError, "max_failures must be.*\nspares must be a whole"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        Recovery(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh_shape": {"stage": 1}, "mpmd_axis": "stage", "recovery": Recovery()}, "two groups at least"),
        ({"groups": [{"data": 2}, {"data": 1}], "recovery": Recovery(spares=1)}, "groups that are alike"),
    ],
    ids=["one group", "spares"],
)
def test_groups_that_cannot_recover(arguments, message):
    with pytest.raises(ValueError, match=message):
        cluster.launch(**arguments)


def add_step(journal, nbytes=0):
    """A step of two groups, which are sent the same array."""
    request = StepRequest(0, 0, (), (), {0: np.zeros(nbytes, np.uint8)})
    step = journal.add_step({0: request, 1: request})
    for mpmd_idx in (0, 1):
        journal.answer(step, mpmd_idx, StepReply({}))


def commit(journal):
    journal.mark_copied(journal.attempt, journal.begin_snapshot({}))


def test_a_policy_with_parts_is_hashable():
    first, second = Recovery(parts={"sampler": None}), Recovery(parts={"sampler": None})
    assert len({first, second}) == 1 and Recovery() != first


def test_snapshots_are_due_after_the_first_step_and_then_now_and_again():
    journal, recovery, due = CountingJournal(), Recovery(every=3), []
    assert not recovery.snapshot_is_due(journal)
    for number in range(1, 9):
        add_step(journal)
        if recovery.snapshot_is_due(journal):
            due.append(number)
            commit(journal)
    assert due == [1, 4, 7]


def test_large_batches_bring_snapshots_forward_and_make_steps_wait(monkeypatch):
    monkeypatch.setattr(policy, "_LOG_BYTES", 100)
    journal, recovery = CountingJournal(), Recovery(every=50)
    add_step(journal)
    commit(journal)
    add_step(journal, 40)
    assert not recovery.snapshot_is_due(journal)
    add_step(journal, 40)
    assert recovery.snapshot_is_due(journal)
    journal.begin_snapshot({})
    assert not recovery.is_late(journal)
    add_step(journal, 40)
    assert recovery.is_late(journal)


def processes(*nodes_of_groups):
    """For each group a string, with a letter for the node of each process."""
    return [
        ProcessInfo(mpmd_idx, rank, "", node, 0, (), ())
        for mpmd_idx, nodes in enumerate(nodes_of_groups)
        for rank, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "keepers"),
    [
        ("a a a", [1, 2, 0]),
        ("a a b b", [2, 3, 0, 1]),
        ("a b b b", [1, 0, 0, 0]),
        ("ab ab", [3, 2, 1, 0]),
        ("aa b", [2, 2, 0]),
    ],
)
def test_keepers_are_in_other_groups_and_on_other_nodes(nodes, keepers):
    assert choose_keepers(processes(*nodes.split())) == dict(enumerate(keepers))


def test_groups_that_are_left_out_have_no_keepers_and_keep_nothing():
    on_nodes = processes(*"a b b a".split())
    assert choose_keepers(on_nodes, left_out=[1]) == {0: 2, 2: 3, 3: 2}
    assert choose_keepers(on_nodes, left_out=range(4)) == {}


def test_copies_that_are_missing_come_from_who_has_them():
    keepers = {0: 1, 1: 2, 2: 0}
    assert missing_copies({0: {0, 1}, 1: {1, 2}, 2: {2, 0}}, keepers) == []
    without_one = {0: {0}, 1: {2}, 2: {2, 0}}
    assert missing_copies(without_one, keepers) == [MissingCopy(0, 0, 1), MissingCopy(1, 2, 1)]
    assert missing_copies(without_one, {**keepers, 0: 2}) == [MissingCopy(0, 0, 2), MissingCopy(1, 2, 1)]


def test_a_report_reads_as_a_sentence():
    report = RecoveryReport(
        (1,), "group 1 died: it was killed. More of Ray's", 17, 7, {"started": 2.5, "loaded": 0.25}
    )
    assert report.total == 2.75
    assert str(report) == (
        "recovered group 1 at step 17 in 2.75 s (started 2.50, loaded 0.25; 7 steps run again): "
        "group 1 died: it was killed"
    )


def test_a_report_says_who_shares_and_until_when():
    arguments = ((1,), "group 1 moves: its node is to end", None, 0, {"prepared": 1.0})
    assert str(RecoveryReport(*arguments, kind=DRAINED, shares_with={1: 0})) == (
        "moved (drained) group 1 in 1.00 s (prepared 1.00; 0 steps run again): group 1 moves: its node is to "
        "end; group 1 shares the devices of group 0 until the cluster has room again"
    )
    assert str(RecoveryReport(*arguments, kind=SHRUNK, shares_with={1: 0})).endswith(
        "group 1 shares the devices of group 0 until mesh.resize asks for more places"
    )
