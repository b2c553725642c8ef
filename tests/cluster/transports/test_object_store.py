"""The receiving end of the transport by Ray's object store."""

import jax
import numpy as np

from cluster.protocol.packing import pack
from cluster.transports.inbox import ProcessInbox
from cluster.transports.object_store import ObjectStoreTransport
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
