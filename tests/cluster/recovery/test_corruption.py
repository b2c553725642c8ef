"""The reaction to wrong bits: the groups that are replaced, and the errors where it cannot be told which."""

import pytest

from cluster.recovery import Recovery
from cluster.recovery.comparison import Difference, FaultKind, faulty_groups
from cluster.recovery.corruption import Finding, Reactions, replica_findings
from cluster.recovery.report import CorruptionReport
from mpmd.runtime.digests import ProcessDigests, ShardDigest, ValueDigest


def message(src, dst):
    return Difference(FaultKind.MESSAGE, (src, dst), 5, text="message 0", is_ambiguous=True)


def computed(mpmd_idx):
    return Difference(FaultKind.COMPUTED, (mpmd_idx,), 5)


def process(mpmd_idx, *digests, rank=0, kind="cpu"):
    """Its devices have these digests of a value that group 0 has sent to all others."""
    shards = tuple(ShardDigest(f"cpu:{i}", (), digest) for i, digest in enumerate(digests))
    values = {7: ValueDigest("float32[]", shards, mpmd_idx > 0)}
    return ProcessDigests(mpmd_idx, rank, "here", (kind,), values)


def react(reaction, *differences):
    findings = [Finding(each, CorruptionReport.of(each, (), "So it is")) for each in differences]
    return Reactions(reaction).react(findings)


def test_a_message_alone_does_not_tell_which_group_is_wrong():
    reaction = react("replace", message(0, 1))
    assert reaction.replaced == frozenset() and reaction.error.mpmd_idxs == (0, 1)
    assert 'on_corruption="replace" replaces no group, because it cannot be told' in str(reaction.error)
    assert "cannot be told" not in str(react("raise", message(0, 1)).error)
    assert react("warn", message(0, 1)).error is None


@pytest.mark.parametrize(
    ("differences", "faulty"),
    [
        ([message(1, 0), message(1, 2)], {1}),
        ([message(1, 0), computed(1)], {1}),
        ([message(0, 1), message(2, 3)], None),
        ([message(0, 1), computed(2)], None),
        ([computed(1), computed(2)], {1, 2}),
    ],
)
def test_several_differences_may_tell_it(differences, faulty):
    assert faulty_groups(differences) == faulty
    assert react("replace", *differences).replaced == (faulty or set())


@pytest.mark.parametrize(
    ("processes", "replaced"),
    [
        ([process(0, 1, 2)], {0}),
        ([process(0, 1, 1), process(1, 1, 2)], {1}),
        ([process(0, 1), process(1, 2), process(2, 1)], {1}),
        ([process(0, 1), process(1, 2)], None),
        ([process(0, 1, 1, 1), process(1, 2)], None),
    ],
)
def test_copies_tell_it_by_a_majority_of_groups_or_within_one(processes, replaced):
    reaction = Reactions("replace").react(replica_findings(processes, "So it is"))
    assert reaction.replaced == (replaced or set())
    assert (reaction.error is None) == (replaced is not None)


def test_copies_that_processes_of_other_kinds_have_computed_are_inconclusive_and_said_once():
    reactions = Reactions("raise")
    findings = replica_findings([process(0, 1), process(0, 2, rank=1, kind="other")], "So it is")
    (action,) = reactions.react(findings).reports
    assert (action.report.kind, action.report.mpmd_idxs) == ("inconclusive", (0,))
    assert "inconclusive: copies of 1 values differ on group 0" in str(action.report)
    assert reactions.react(findings) == ([], None, frozenset())


def test_a_policy_with_parts_is_hashable():
    first, second = Recovery(parts={"sampler": None}), Recovery(parts={"sampler": None})
    assert len({first, second}) == 1 and Recovery() != first
