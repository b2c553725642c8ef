"""The lock of a ledger, and that callbacks of the user's futures run without it."""

import signal
import threading

import pytest

from cluster.recovery.lock import Lock
from mpmd.runtime.requests import Fetch
from tests.support.pretended_groups import SOON, runtime


def ask_in_another_thread(driven):
    asked = []
    thread = threading.Thread(target=lambda: asked.append(driven.ask({0: Fetch(1)})), daemon=True)
    thread.start()
    thread.join(SOON)
    return asked


@pytest.mark.parametrize("end", [lambda driven: driven.attempts[-1].reply(0), lambda driven: driven.close()])
def test_a_callback_of_a_step_may_wait_for_a_thread_that_asks_the_mesh(end):
    driven = runtime()
    asked = []
    driven.step()[0].add_done_callback(lambda _: asked.extend(ask_in_another_thread(driven)))
    end(driven)
    assert len(asked) == 1


def test_who_waits_makes_deferred_calls_before():
    lock, made = Lock(), []
    with lock, lock:
        lock.defer(lambda: made.append(1))
        assert lock.wait_for(lambda: made)
        with lock:
            lock.defer(lambda: made.append(2))
        assert made == [1], "the lock is held as before"
    assert made == [1, 2]


def test_others_may_take_the_lock_while_its_owner_waits():
    lock, made, was_held = Lock(), [], threading.Event()

    def make():
        with lock:
            lock.defer(lambda: made.append(1))
            was_held.set()
            lock.notify_all()

    with lock, lock:
        thread = threading.Thread(target=make)
        thread.start()
        assert lock.wait_for(was_held.is_set, SOON)
        lock.defer(lambda: made.append(2))
    thread.join()
    assert sorted(made) == [1, 2]


def test_after_an_interrupted_call_the_others_are_made_by_whoever_releases_the_lock_next():
    lock, made = Lock(), []

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lock:
        lock.defer(interrupt)
        lock.defer(lambda: made.append(1))
    with lock:
        pass
    assert made == [1]


def test_an_interrupt_waits_for_the_end_of_a_deferred_call():
    lock, made = Lock(), []

    def settle():
        signal.raise_signal(signal.SIGINT)
        made.append(1)

    with pytest.raises(KeyboardInterrupt), lock:
        lock.defer(settle)
    assert made == [1]


def test_an_interrupt_while_deferred_calls_are_made_in_a_wait_leaves_the_lock_held(monkeypatch):
    lock, made = Lock(), []

    def interrupted():
        lock._lock.release()
        monkeypatch.setattr(lock, "release", lock._lock.release)
        signal.raise_signal(signal.SIGINT)

    with lock, lock:
        lock.defer(lambda: made.append(1))
        monkeypatch.setattr(lock, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.wait()
        assert made == [1]
        lock.defer(lambda: made.append(2))
    assert made == [1, 2]
