"""How far a sender may be ahead of its receiver."""

from cluster.transports.window import ReceiptWindow, SendWindow


def test_a_sender_may_be_one_step_ahead():
    window = SendWindow()
    for step in (7, 7, 9):
        window.begin(step)
        assert window.is_open(0)
        window.count_sent()
    window.begin(12)
    assert [window.is_open(received) for received in (0, 1, 2)] == [False, False, True]
    window.count_sent()
    window.begin(13)
    assert [window.is_open(received) for received in (2, 3)] == [False, True]


def test_asking_whether_the_window_is_open_changes_nothing():
    window = SendWindow()
    window.begin(1)
    window.count_sent()
    window.begin(2)
    window.count_sent()
    window.begin(3)
    assert [window.is_open(received) for received in (0, 1, 0)] == [False, True, False]


def test_a_receipt_is_due_when_all_messages_of_earlier_steps_were_taken():
    receipts = ReceiptWindow()
    assert [receipts.count_arrived(4), receipts.count_arrived(4)] == [0, None]
    assert receipts.count_taken() is None
    assert receipts.count_arrived(5) is None, "one message of step 4 was not taken"
    assert receipts.count_taken() == 2
    assert receipts.count_taken() is None
    assert receipts.count_arrived(6) == 3, "the receiver waits for it"


def test_receipts_open_the_window_in_time_and_are_few():
    """For steps of three messages, which the receiver takes a step later than it could, and in any order."""
    window, receipts, known, num_receipts = SendWindow(), ReceiptWindow(), 0, 0
    for step in range(20):
        window.begin(step)
        assert window.is_open(known)
        returned = []
        for _ in range(3):
            window.count_sent()
            returned.append(receipts.count_arrived(step))
        if step:
            returned += [receipts.count_taken() for _ in range(3)]
        found = [count for count in returned if count is not None]
        known = max([known, *found])
        num_receipts += len(found)
    assert num_receipts <= 20


def test_a_step_in_which_nothing_was_sent_does_not_count():
    """Such as one that was aborted while the sender waited."""
    window = SendWindow()
    for step in range(2):
        window.begin(step)
        window.count_sent()
    window.begin(2)
    assert not window.is_open(0)
    window.begin(3)
    assert (window.is_open(0), window.is_open(1)) == (False, True)
