"""How far a sender may be ahead of its receiver."""

from cluster.transports.window import SendWindow


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
