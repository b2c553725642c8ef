"""The parts of ``cluster`` that need no cluster."""

import jax
import ml_dtypes
import numpy as np
import pytest

from cluster.environment import actor_environment
from cluster.resources import describe_shortage, fitting_cpus
from cluster.transports.inbox import Inbox
from cluster.transports.object_store import ObjectStoreTransport
from cluster.wire import pack, unpack
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId

COUNT = "--xla_force_host_platform_device_count"


def test_a_groups_environment():
    assert actor_environment({}, "", "cpu", num_devices=2, num_threads=3) == {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "3",
        "XLA_FLAGS": f"{COUNT}=2",
    }
    assert actor_environment({}, "--a", "cuda", 2, 3) == {"JAX_PLATFORMS": "cuda", "NPROC": "3"}


def test_the_drivers_flags_are_kept_but_for_its_device_count():
    environment = actor_environment({}, f"--a=1 {COUNT}=8 --b", "cpu", 2, 4)
    assert environment["XLA_FLAGS"] == f"--a=1 --b {COUNT}=2"


def test_programs_for_one_thread_are_not_ordered_for_many():
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler"
    assert actor_environment({}, "", "cpu", 1, 1)["XLA_FLAGS"] == f"{COUNT}=1 {flag}=false"
    given = {"XLA_FLAGS": f"{flag}=true"}
    assert actor_environment(given, "", "cpu", 1, 1)["XLA_FLAGS"] == f"{flag}=true {COUNT}=1"


def test_the_users_variables_win():
    given = {"XLA_FLAGS": "--c", "NPROC": "9", "OF_MINE": "x"}
    environment = actor_environment(given, "--a", "cpu", 1, 2)
    assert environment == given | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--c {COUNT}=1"}


@pytest.mark.parametrize(
    ("nodes", "num_groups", "cpus"),
    [
        ([2], 2, 1),
        ([16, 16], 4, 1),
        ([2], 4, 0.5),
        ([2], 3, 0.5),
        ([1, 1], 3, 0.5),
        ([1], 3, 0.3333),
        ([0, 4], 8, 0.5),
        ([0.5], 1, 0.5),
        ([0], 2, 1),
    ],
)
def test_groups_ask_for_a_cpu_or_a_part_that_fits(nodes, num_groups, cpus):
    assert fitting_cpus(nodes, num_groups) == cpus


def test_a_shortage_that_is_only_fragmentation_shows_the_nodes():
    nodes = [{"Resources": {"CPU": 3.0}}, {"Resources": {"CPU": 3.0}}]
    assert describe_shortage({"CPU": 2}, 3, {"CPU": 6.0}, nodes).splitlines() == [
        "3 groups of 2 CPU each, every one on one node:",
        "  CPU: 6 asked, 6 available of 6",
        "  nodes: 3 CPU; 3 CPU",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", ml_dtypes.bfloat16, ml_dtypes.int4])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_packing_keeps_arrays_and_copies_nothing(dtype, shape):
    array = np.ones(shape, dtype)
    packed = pack(array)
    assert packed.bits.dtype.isbuiltin == 1
    assert packed.bits.size == 0 or np.shares_memory(packed.bits, array)
    again = unpack(packed)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(again, array)


def test_received_arrays_do_not_alias_what_arrived():
    """An array whose memory is aligned as device_put likes it would be aliased without a copy."""
    memory = np.zeros(4 * 1024 + 64, "uint8")
    start = -memory.ctypes.data % 64
    buffer = memory[start : start + 4 * 1024].view("float32")
    message = MessageId(step=0, src=1, dst=0, tag=0)
    inbox = Inbox()
    ObjectStoreTransport(inbox).deliver(message, [pack(buffer)])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (value,) = inbox.take(message).open([sharding])
    array = jax.device_put(value, sharding)
    buffer[:] = 7
    assert float(array.max()) == 0


def test_an_aborted_receive_says_why():
    message = MessageId(step=3, src=1, dst=0, tag=0)
    inbox = Inbox()
    inbox.abort(3, "group 1 died")
    ObjectStoreTransport(inbox).deliver(message, [])
    with pytest.raises(StepAborted, match="group 1 died"):
        inbox.take(message)
