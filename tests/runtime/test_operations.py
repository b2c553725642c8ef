"""Operations of a step on their own."""

import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.runtime.activity import Activity
from mpmd.runtime.operations import ReceiveMessage, SendMessage, StepState


class Messages:
    """A transport whose messages are in the host's memory."""

    def __init__(self, *arrays):
        self.arrays = arrays

    def recv(self, message, shardings):
        return list(self.arrays)


@pytest.mark.parametrize("on_devices", [False, True])
def test_what_is_received_for_accelerators_is_put_there_once_as_its_readers_need_it(on_devices):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    wanted = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data",), ()))
    values = np.arange(8, dtype="float32"), np.ones((2, 2), "int32")
    state = StepState(0, Activity(), table=[None, None])
    ReceiveMessage(Messages(*values), (1, 0), wanted, 0, 1, 0, on_devices).perform(state)
    for value, sharding, slot in zip(values, wanted, (1, 0), strict=True):
        received = state.table[slot]
        np.testing.assert_array_equal(np.asarray(received), value)
        assert isinstance(received, jax.Array) == on_devices
        assert not on_devices or received.sharding == sharding


def test_a_group_that_waits_to_send_says_since_when():
    class Full:
        def send(self, message, arrays):
            self.doing = state.activity.read()

    state, full = StepState(0, Activity()), Full()
    state.activity.now = ("a task before it", time.perf_counter() - 1000)
    SendMessage(full, (), 0, 1, 3).perform(state)
    assert full.doing.what == "sending message 3 to group 1" and full.doing.seconds < 500
