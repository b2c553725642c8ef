"""Who is to blame when actors do not start or connect. Nothing is started."""

import errno

import pytest

from cluster.start import connect
from cluster.start.connect import StartingActors
from mpmd.errors import GroupDiedError
from tests.support.processes import endpoints


class Call:
    """A method of an actor; ``remote`` gives the actor, in place of what Ray would."""

    def __init__(self, actor):
        self.remote = lambda *arguments: actor


class Actor:
    """Answers every call: with an error of its process if there is one, and never if it is late."""

    def __init__(self, error=None, is_late=False):
        self.error = error
        self.is_late = is_late

    def __getattr__(self, name):
        return Call(self)


class Ray:
    """In place of ``ray``. A call is its actor."""

    class exceptions:
        class RayError(Exception):
            def __init__(self, cause):
                super().__init__(f"a traceback: {cause}")
                self.cause = cause

    ObjectRef = object

    @staticmethod
    def wait(calls, num_returns=1, timeout=None):
        ready = [call for call in calls if not call.is_late][:num_returns]
        return ready, [call for call in calls if call not in ready]

    @classmethod
    def get(cls, call):
        if isinstance(call, Actor) and call.error is not None:
            raise cls.exceptions.RayError(call.error)


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(connect, "ray", Ray)
    monkeypatch.setattr(connect, "progress_of", lambda actor: "process 7 imports JAX")
    monkeypatch.setattr(connect, "log_directory", lambda: "/tmp/ray/logs")

    def start(*actors, timeout=9.0):
        return StartingActors(actors, endpoints([1] * len(actors)), timeout).call(
            "connect", [()] * len(actors)
        )

    return start


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_that_has_no_descriptors_is_blamed_and_not_those_that_wait_for_it(start, number):
    innocent = Actor(ConnectionError("the other end has closed the connection"))
    with pytest.raises(GroupDiedError, match="group 2 cannot connect: OSError: ") as caught:
        start(innocent, Actor(), Actor(OSError(number, "no more")))
    assert caught.value.mpmd_idx == 2


def test_of_another_error_nobody_is_blamed(start):
    with pytest.raises(RuntimeError, match="group 1 could not start: a traceback: refused") as caught:
        start(Actor(), Actor(ConnectionRefusedError("refused")))
    assert not isinstance(caught.value, GroupDiedError)


def test_a_long_wait_is_said_once_before_it_ends(start, monkeypatch, capsys):
    monkeypatch.setattr(connect, "_QUIET_SECONDS", 0.1)
    with pytest.raises(RuntimeError):
        start(Actor(is_late=True), timeout=0.5)
    said = capsys.readouterr().err
    assert said.count("waiting up to 0.5 s: the actors of group 0 did not start within") == 1
    assert "launch(timeout=...)" in said
