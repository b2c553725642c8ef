"""How far a sender may be ahead of its receiver."""

from cluster.transports.window import ReceiptWindow, SendWindow


def test_a_sender_may_be_one_step_ahead():
    window = SendWindow()
    for step in (7, 7, 9):
        assert window.required(step) == 0
        window.count_sent()
    assert window.required(12) == 2
    window.count_sent()
    assert window.required(13) == 3


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
        assert window.required(step) <= known
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
