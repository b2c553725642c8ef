"""Groups of one process hand values over."""

import jax
import numpy as np
import pytest

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
