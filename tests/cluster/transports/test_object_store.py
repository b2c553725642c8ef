"""The receiving end of the transport by Ray's object store."""

import jax
import numpy as np
import pytest

from cluster.protocol.packing import pack
from cluster.transports.inbox import ProcessInbox
from cluster.transports.object_store import ObjectStoreTransport
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId


def test_received_arrays_do_not_alias_the_object_store():
    """The memory is aligned such that device_put would alias it."""
    memory = np.zeros(4 * 1024 + 64, "uint8")
    start = -memory.ctypes.data % 64
    buffer = memory[start : start + 4 * 1024].view("float32")
    message = MessageId(step=0, src=1, dst=0, tag=0)
    inbox = ProcessInbox()
    ObjectStoreTransport(inbox).deliver(message, [pack(buffer)])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (value,) = inbox.take(message).open([sharding])
    array = jax.device_put(value, sharding)
    buffer[:] = 7
    assert float(array.max()) == 0


def test_an_aborted_receive_says_why():
    message = MessageId(step=3, src=1, dst=0, tag=0)
    inbox = ProcessInbox()
    inbox.abort(3, "group 1 died")
    ObjectStoreTransport(inbox).deliver(message, [])
    with pytest.raises(StepAborted, match="group 1 died"):
        inbox.take(message)
