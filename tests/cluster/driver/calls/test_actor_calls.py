"""Consequences of the replies of actors that only pretend."""

import signal
import threading
from concurrent.futures import Future
from unittest.mock import MagicMock

import pytest
import ray

from cluster.driver.calls import actor_calls
from cluster.driver.calls.actor_calls import ActorCalls
from cluster.driver.calls.joined import failed
from cluster.driver.calls.liveness import TimeLimits
from cluster.protocol.process_info import ProcessInfo
from cluster.tcp.credentials import make_credentials
from cluster.tcp.rpc import Server
from cluster.transports.inbox import PeerLostError
from mpmd.errors import GroupDiedError
from mpmd.runtime.requests import Fetch, StepRequest
from tests.support.pairs import both_ends
from tests.support.processes import endpoints

SOON = 20

STEP = StepRequest(program=0, step=1, inputs=(), outputs=(), run=1)


@pytest.fixture
def deaths():
    """The groups that have died, in this order."""
    return []


@pytest.fixture
def infos(monkeypatch):
    monkeypatch.setattr(actor_calls, "RaySession", MagicMock)
    monkeypatch.setattr(ray, "get_runtime_context", MagicMock())
    return [ProcessInfo(i, 0, "host", "id", 100 + i, (), ()) for i in range(2)]


@pytest.fixture
def calls(infos, deaths):
    actors = [MagicMock(), MagicMock()]
    calls = ActorCalls(
        actors,
        endpoints([1, 1]),
        MagicMock(),
        [],
        infos,
        TimeLimits(),
        lambda error: deaths.append(error.mpmd_idx),
    )
    yield calls
    calls.close()


def fail_step(actor, error):
    """Has the actor reply to its last step."""
    (on_reply,) = actor.answer.remote.return_value.future.return_value.add_done_callback.call_args.args
    on_reply(failed(error))


def test_of_two_groups_that_report_each_other_lost_the_second_one_lives(calls, deaths):
    """Both reports have come before the first is handled. With both dead, nobody would have their values."""
    futures = calls.ask_step(dict.fromkeys((0, 1), STEP))
    gate = threading.Event()
    calls._events.put(gate.wait)
    for number, actor in enumerate(calls.actors):
        fail_step(actor, PeerLostError("its process has closed its connections", 1 - number))
    gate.set()
    for future in futures.values():
        assert isinstance(future.exception(SOON), GroupDiedError)
    calls.close()
    assert deaths == [1]


def test_a_process_that_cannot_take_a_message_is_the_one_that_has_to_go(calls, deaths):
    futures = calls.ask_step(dict.fromkeys((0, 1), STEP))
    reason = "group 1 cannot take a message of group 0: OSError: [Errno 24] Too many open files"
    fail_step(calls.actors[1], PeerLostError(reason, 1))
    for future in futures.values():
        assert str(future.exception(SOON)) == reason
    calls.close()
    assert deaths == [1]


def test_what_is_detached_fails_for_the_reason_given_and_lets_actors_live(calls):
    waiting: Future = calls.ask(0, Fetch(7))
    calls.detach(GroupDiedError("group 1 died", 1))
    with pytest.raises(GroupDiedError, match="group 1 died"):
        waiting.result(SOON)
    with pytest.raises(GroupDiedError, match="group 1 died"):
        calls.ask(0, Fetch(7))
    calls._session.kill.assert_not_called()


def test_an_interrupt_waits_until_a_request_is_written_whole(calls):
    written = []

    def send(request):
        signal.raise_signal(signal.SIGINT)
        written.append(request)

    calls._clients = [MagicMock(send=send), MagicMock()]
    with pytest.raises(KeyboardInterrupt):
        calls.ask(0, Fetch(7))
    assert len(written) == 1


def test_who_gets_a_reply_may_close_the_mesh(infos):
    """In the thread that has received the reply, for whose end the end of the mesh waits."""
    (accepted, connection), may_answer = both_ends(make_credentials()), threading.Event()
    server = Server("group 0", accepted)
    threading.Thread(target=server.serve, args=(lambda _: may_answer.wait(),), daemon=True).start()
    calls = ActorCalls([MagicMock()], endpoints([1]), MagicMock(), [connection], infos[:1], TimeLimits())
    closed: Future = Future()
    calls.ask(0, Fetch(7)).add_done_callback(lambda _: closed.set_result(calls.close()))
    may_answer.set()
    closed.result(SOON)
    calls._thread.join(SOON)
    assert not calls._thread.is_alive()
