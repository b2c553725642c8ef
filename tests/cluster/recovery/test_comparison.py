"""Two runs of the same steps: the first differences, and whose fault they are."""

import numpy as np

from cluster.recovery.comparison import Difference, FaultKind, Run, differences
from cluster.recovery.report import CorruptionReport
from mpmd.runtime.digests import (
    DeviceDigest,
    DigestedEvent,
    EventKind,
    ProcessDigests,
    ProcessEvents,
    ShardDigest,
    ValueDigest,
)
from mpmd.runtime.requests import StepReply

MADE, SENT, RECEIVED = EventKind.MADE, EventKind.SENT, EventKind.RECEIVED
OLD, NEW = 1, 2
"""The handles of a value that no step makes, and of one that the last step has made."""


def event(kind, name, digest, peer=None):
    """An event on two devices; a pair of digests is that of each."""
    digests = digest if isinstance(digest, tuple) else (digest, digest)
    return DigestedEvent(kind, name, peer, tuple(map(DeviceDigest, ("cpu:0", "cpu:1"), digests)))


def first_group(forward=1, backward=1, sent=1, loss=0.5, has_tasks=True):
    """A step of group 0: a forward, which is sent, and a backward of what is received."""
    events = [
        event(MADE, "fwd_0__0", forward),
        event(SENT, "0", sent, 1),
        event(RECEIVED, "1", 1, 1),
        event(MADE, "bwd_0__0", backward),
    ]
    return StepReply({9: np.float32(loss)}, events=(kept(events, has_tasks),))


def second_group(received=1, sent=1, has_tasks=True):
    """A step of group 1."""
    events = [
        event(RECEIVED, "0", received, 0),
        event(MADE, "fwd_1__0", sent),
        event(MADE, "bwd_1__0", sent),
        event(SENT, "1", sent, 0),
    ]
    return StepReply({}, events=(kept(events, has_tasks),))


def kept(events, has_tasks):
    return ProcessEvents(0, tuple(e for e in events if has_tasks or e.kind is not MADE))


def values(mpmd_idx, old=1, new=1):
    digests = {
        handle: ValueDigest("float32[]", (ShardDigest("cpu:0", (), digest),), False)
        for handle, digest in ((OLD, old), (NEW, new))
    }
    return ProcessDigests(mpmd_idx, 0, "here", ("cpu",), digests)


def run(first=None, second=None, of_values=None, steps=(5,)):
    """A run of two groups, of one step or of several that are alike."""
    replies = {0: first or first_group(), 1: second or second_group()}
    return Run(dict.fromkeys(steps, replies), of_values or (values(0), values(1)))


def found(one, other):
    return differences(one, other, {NEW})


def test_equal_runs_have_no_differences():
    assert found(run(), run()) == ()
    assert found(run(first_group(has_tasks=False), second_group(has_tasks=False)), run()) == ()


def test_a_task_with_other_results_is_named_with_its_device():
    wrong = first_group(forward=(1, 7), sent=7)
    (difference,) = found(run(), run(wrong, second_group(received=7, sent=8)))
    assert difference == Difference(
        FaultKind.COMPUTED, (0,), 5, ("cpu:1",), ("fwd_0__0",), "the results of fwd_0__0"
    )


def test_without_the_tasks_of_one_run_those_in_question_are_named():
    wrong = second_group(sent=8, has_tasks=False)
    (difference,) = found(run(first_group(has_tasks=False), wrong), run())
    assert (difference.mpmd_idxs, difference.tasks) == ((1,), ("fwd_1__0", "bwd_1__0"))
    assert difference.text == "message 1 to group 0"


def test_a_message_that_changes_on_its_way():
    (difference,) = found(run(), run(second=second_group(received=7, sent=8)))
    assert (difference.kind, difference.mpmd_idxs) == (FaultKind.MESSAGE, (0, 1))


def test_a_value_that_changes_where_it_was_kept():
    wrong = run(second=second_group(sent=8), of_values=(values(0), values(1, old=7, new=7)))
    (difference,) = found(wrong, run())
    assert (difference.kind, difference.mpmd_idxs) == (FaultKind.KEPT, (1,))
    assert "float32[] that no step changes" in difference.text


def test_a_state_that_differs_alone():
    (difference,) = found(run(), run(of_values=(values(0, new=7), values(1))))
    assert (difference.kind, difference.mpmd_idxs) == (FaultKind.COMPUTED, (0,))
    assert difference.step is None and difference.devices == ("cpu:0",)


def test_a_result_that_differs_alone():
    (difference,) = found(run(), run(first_group(loss=0.25)))
    assert (difference.mpmd_idxs, difference.text) == ((0,), "a result of the step")


def test_a_step_that_fails_once():
    one = run()
    failed = Run({5: {**one.replies[5], 1: None}}, one.processes)
    (difference,) = found(one, failed)
    assert difference.mpmd_idxs == (1,) and "it failed once" in difference.text
    assert found(failed, failed) == ()


def test_the_first_of_several_steps_counts():
    one, other = run(steps=(5, 6)), run(first_group(backward=7), steps=(5, 6))
    other = Run({5: one.replies[5], 6: other.replies[6]}, other.processes)
    (difference,) = found(one, other)
    assert (difference.step, difference.tasks) == (6, ("bwd_0__0",))


def test_a_task_that_the_state_of_an_earlier_step_has_misled_is_not_blamed_alone():
    """An ordinary run has the digests of messages alone, so a wrong state shows in the next step at first."""
    ordinary, wrong = first_group(has_tasks=False), first_group(forward=7, sent=7)
    right, repeated = run(ordinary, steps=(5, 6)), run(steps=(5, 6))
    misled = Run(
        {5: repeated.replies[5], 6: {0: wrong, 1: second_group(received=7, sent=8)}}, right.processes
    )
    (difference,) = found(right, misled)
    text = CorruptionReport.of(difference, right.processes, "All goes on").text
    assert "in step 6, by fwd_0__0 or an earlier task, through the state; first, message 0" in text
    (in_first,) = found(right, Run({5: misled.replies[6], 6: misled.replies[6]}, right.processes))
    assert "in step 5, by fwd_0__0; first" in CorruptionReport.of(in_first, right.processes, "").text
    (known,) = found(repeated, misled)
    assert "in step 6, by fwd_0__0; first, the results of fwd_0__0" in CorruptionReport.of(known, (), "").text
