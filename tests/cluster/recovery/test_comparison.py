"""Two runs of the same steps: the first difference, and whose fault it is."""

import numpy as np

from cluster.recovery.comparison import StepsRun, compare
from mpmd.runtime.digests import DigestedMessage, ProcessDigests, ShardDigest, ValueDigest
from mpmd.runtime.requests import StepReply

SENT, RECEIVED = False, True


def message(is_received, tag, peer, digest):
    """A message on two devices; a pair of digests is that of each."""
    digests = digest if isinstance(digest, tuple) else (digest, digest)
    return DigestedMessage(is_received, tag, peer, dict(zip(("cpu:0", "cpu:1"), digests, strict=True)))


def first_group(sent=1, received=1, loss=0.5):
    """A step of group 0: it sends message 0, and receives message 1."""
    messages = message(SENT, 0, 1, sent), message(RECEIVED, 1, 1, received)
    return StepReply({9: np.float32(loss)}, messages={0: messages})


def second_group(received=1, sent=1):
    """A step of group 1."""
    messages = message(RECEIVED, 0, 0, received), message(SENT, 1, 0, sent)
    return StepReply({}, messages={0: messages})


def values(mpmd_idx, digest=1):
    shards = (ShardDigest("cpu:0", (), digest),)
    return ProcessDigests(mpmd_idx, 0, "here", ("cpu",), {7: ValueDigest("float32[]", shards, False)})


RIGHT = first_group(), second_group()


def run(step=RIGHT, of_values=(1, 1)):
    """A run of two groups, of one step."""
    return StepsRun({5: dict(enumerate(step))}, tuple(map(values, (0, 1), of_values)))


def without_digests(*losses, of_values=(1, 1)):
    """A run of one step, as on devices whose messages have no digests."""
    return run([StepReply({9: np.float32(loss)}) for loss in losses], of_values=of_values)


def test_the_message_that_differs_first_names_the_group_and_its_device():
    """A group that sends other bits before it has received any has made them."""
    wrong = first_group(sent=(1, 7), received=7), second_group(received=(1, 7), sent=7)
    report = compare(run(), run(wrong))
    assert (report.kind, report.mpmd_idxs, report.devices) == ("computed", (0,), ("cpu:1",))
    assert "first, message 0 to group 1 on group 0" in str(report)


def test_a_result_or_a_value_that_differs_alone():
    report = compare(run(), run((first_group(loss=0.25), second_group())))
    assert (report.kind, report.mpmd_idxs) == ("computed", (0,)) and "a result of the step" in str(report)
    report = compare(run(), run(of_values=(1, 7)))
    assert (report.kind, report.mpmd_idxs, report.step) == ("computed", (1,), None)
    assert "first, a float32[] between steps on group 1" in str(report)


def test_a_step_that_fails_once():
    report = compare(run(), run((None, None)))
    assert (report.kind, report.mpmd_idxs) == ("unlocated", (0, 1)) and "failed only once" in str(report)


def test_without_digests_of_messages_a_group_is_named_if_its_values_alone_differ_between_steps():
    """In a step, the group that returns the loss may have been sent wrong bits."""
    right = without_digests(0.5, 0.5)
    assert compare(right, right) is None
    for losses in ((0.5, 0.25), (0.25, 0.25)):
        report = compare(right, without_digests(*losses))
        assert (report.kind, report.mpmd_idxs) == ("unlocated", (0, 1))
    report = compare(right, without_digests(0.5, 0.5, of_values=(7, 1)))
    assert (report.kind, report.mpmd_idxs) == ("computed", (0,))
    assert compare(right, without_digests(0.5, 0.5, of_values=(7, 7))).kind == "unlocated"
