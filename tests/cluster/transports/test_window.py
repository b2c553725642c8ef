"""How far a sender may be ahead of its receiver."""

from cluster.transports.window import SendWindow


def test_a_sender_may_be_one_step_ahead():
    window, required = SendWindow(), []
    for step in (7, 7, 9, 12, 12, 13):
        required.append(window.required(step))
        window.mark_sent(step)
    assert required == [0, 0, 7, 9, 9, 12], "the step before, which the receiver has to have begun"


def test_a_step_in_which_nothing_was_sent_does_not_count():
    """Such as one that was aborted while the sender waited."""
    window = SendWindow()
    window.mark_sent(1)
    assert [window.required(step) for step in (2, 2, 3)] == [1, 1, 1]
