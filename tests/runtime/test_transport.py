"""Groups of one process hand values over."""

import threading

import jax
import numpy as np
import pytest

from mpmd.errors import StepAborted
from mpmd.runtime.in_process import InProcessTransport
from mpmd.runtime.inbox import Inbox
from mpmd.runtime.transport import MessageId
from mpmd.sharding import to_sharding
from tests.support.parity import mesh_of

SECONDS = 20


@pytest.fixture
def ends():
    """Two groups' transports, and their submeshes."""
    with mesh_of(2) as mesh:
        submeshes = mesh.unstack
        inboxes = [Inbox() for _ in submeshes]
        yield [(InProcessTransport(inboxes, submeshes, i), submesh) for i, submesh in enumerate(submeshes)]


def message(step, tag=0):
    return MessageId(step, 0, 1, tag)


def test_what_was_sent_survives_its_donation(ends):
    (sender, here), (receiver, there) = ends
    array = jax.device_put(np.arange(1000.0, dtype="float32"), to_sharding((), here))
    sender.send(message(0), [array])
    jax.jit(lambda x: x * 0, donate_argnums=0)(array).block_until_ready()
    (value,) = receiver.recv(message(0), [to_sharding((), there)])
    np.testing.assert_array_equal(np.asarray(value), np.arange(1000.0))


def test_messages_are_taken_in_any_order(ends):
    (sender, _), (receiver, _) = ends
    for tag in range(4):
        sender.send(message(0, tag), [np.array(tag)])
    assert [int(receiver.recv(message(0, tag), [None])[0]) for tag in (2, 0, 3, 1)] == [2, 0, 3, 1]


def test_an_abort_ends_the_waiting_for_its_step_alone(ends):
    (sender, _), (receiver, _) = ends
    raised = []

    def wait():
        with pytest.raises(StepAborted, match="the sender failed") as caught:
            receiver.recv(message(1), [None])
        raised.append(caught)

    waiting = threading.Thread(target=wait)
    waiting.start()
    receiver._inboxes[1].abort(1, "the sender failed")
    waiting.join(SECONDS)
    assert raised
    sender.send(message(1), [np.array(1)])
    sender.send(message(2), [np.array(2)])
    assert int(receiver.recv(message(2), [None])[0]) == 2
    with pytest.raises(StepAborted):
        receiver.recv(message(1), [None])
