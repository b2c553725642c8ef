"""Messages between two processes, by every transport."""

import itertools
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import ray

from cluster.tcp.credentials import make_credentials
from cluster.transports import inbox
from cluster.transports.choice import NAMES
from cluster.transports.router import Router
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId
from mpmd.sharding import to_sharding
from tests.support.processes import endpoints

SECONDS = 60
SOON = 20
"""Seconds within which a failure ends all waiting, also on a busy machine."""

BOUNDED = ["shared_memory", "network", "device"]
"""Transports that limit how far a sender may be ahead."""

pytestmark = pytest.mark.slow  # tests/cluster/transports has connected transports in one process

every_transport = pytest.mark.parametrize("transport", NAMES)


class End:
    """A process of two devices, with a router for each transport."""

    def __init__(self, mpmd_idx, credentials):
        self.credentials = credentials
        self.submesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 2), ("stage", "fsdp"))
        self.routers = {name: Router(endpoints([1] * 3)[mpmd_idx], self.submesh) for name in NAMES}
        self.kept = {}

    def listen(self):
        listening = [
            router.listen([name], "127.0.0.1", self.credentials) for name, router in self.routers.items()
        ]
        return {name: address for addresses in listening for name, address in addresses.items()}

    def connect(self, peer, addresses):
        for name, router in self.routers.items():
            router.connect({peer: name}, addresses)

    def run(self, function, transport, *arguments):
        """Calls a function with this process and its router for a transport."""
        return function(self, self.routers[transport], *arguments)

    @ray.method(concurrency_group="control")
    def deliver(self, message, packed):
        self.routers["object_store"].deliver(message, packed)

    @ray.method(concurrency_group="control")
    def abort(self, transport, step, reason):
        self.routers[transport].abort(step, reason)


@pytest.fixture(scope="module")
def ends(local_ray):
    """Two connected processes. Tests leave them usable, and use steps of their own."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    actor = ray.remote(concurrency_groups={"control": 2})(End)
    credentials = make_credentials(encryption=True)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    pair = [actor.options(**options).remote(i, credentials) for i in range(2)]
    addresses = ray.get([end.listen.remote() for end in pair], timeout=SECONDS)
    ray.get([end.connect.remote(1 - i, addresses) for i, end in enumerate(pair)], timeout=SECONDS)
    yield pair
    for end in pair:
        ray.kill(end)


fresh = itertools.count()
"""Numbers of steps that no test has used."""


def outcome(call):
    """The exception of a call in the other process."""
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(call, timeout=SOON)
    return caught.value.cause


def message(step, tag, src=0):
    return MessageId(step, src, 1 - src, tag)


def send(end, router, step, contents, spec=(), src=0):
    """Sends a message for each content; the tags count them."""
    sharding = to_sharding(spec, end.submesh)
    for tag, arrays in enumerate(contents):
        on_devices = [jax.device_put(a, sharding if a.ndim else to_sharding((), end.submesh)) for a in arrays]
        router.send(message(step, tag, src), on_devices)


def receive(end, router, step, tags, count=1, spec=(), src=0):
    """The contents of messages, received in the given order, as copies."""
    wanted = [to_sharding(spec, end.submesh)] * count
    return [[np.array(value) for value in router.recv(message(step, tag, src), wanted)] for tag in tags]


CONTENTS = {
    "scalars": [np.array(3, "int32"), np.array(True), np.array(1.5, "float32")],
    "small floats": [
        np.arange(12).reshape(2, 6).astype(d) for d in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
    ],
    "small integers": [np.arange(8).astype(d) for d in ("int8", "uint8", ml_dtypes.int4)],
    "empty": [np.zeros((0, 4), "float32"), np.ones(2, "float32"), np.zeros(0, ml_dtypes.bfloat16)],
    "nothing but empty": [np.zeros((2, 0), "float32")],
    "large": [np.random.default_rng(0).standard_normal((512, 514), "float32"), np.arange(4, dtype="uint8")],
    "large and empty": [np.zeros((0, 4), "float32"), np.ones(2**20, "int8")],
}


@every_transport
@pytest.mark.parametrize("spec", [(), ("fsdp",)], ids=["replicated", "split"])
def test_messages_keep_every_bit_both_ways(ends, transport, spec):
    contents = [
        arrays if not spec else [a for a in arrays if a.ndim and not a.shape[0] % 2]
        for arrays in CONTENTS.values()
    ]
    for src in (0, 1):
        step = next(fresh)
        ends[src].run.remote(send, transport, step, contents, spec, src)
        for tag, arrays in enumerate(contents):
            call = ends[1 - src].run.remote(receive, transport, step, [tag], len(arrays), spec, src)
            (received,) = ray.get(call, timeout=SECONDS)
            for value, array in zip(received, arrays, strict=True):
                assert (value.dtype, value.shape) == (array.dtype, array.shape)
                assert value.tobytes() == array.tobytes()


def send_and_donate(end, router, step):
    donated = jax.device_put(np.full((2**18,), 7.0, "float32"), to_sharding((), end.submesh))
    router.send(message(step, 0), [donated])
    jax.block_until_ready(jax.jit(jnp.negative, donate_argnums=0)(donated))
    deleted = jax.device_put(np.full((2**18,), 8.0, "float32"), to_sharding((), end.submesh))
    router.send(message(step, 1), [deleted])
    deleted.delete()


@pytest.mark.slow
@every_transport
def test_what_was_sent_may_be_donated_and_deleted(ends, transport):
    step = next(fresh)
    ray.get(ends[0].run.remote(send_and_donate, transport, step), timeout=SECONDS)
    received = ray.get(ends[1].run.remote(receive, transport, step, [0, 1]), timeout=SECONDS)
    assert [(value.min(), value.max()) for (value,) in received] == [(7, 7), (8, 8)]


@every_transport
def test_an_aborted_step_ends_waits_and_leaves_nothing(ends, transport):
    """For more steps than a sender may be ahead: dropped messages count as received."""
    for _ in range(3):
        step = next(fresh)
        waiting = ends[1].run.remote(receive, transport, step, [7])
        ends[0].run.remote(send, transport, step, [[np.ones(9)], [np.ones(90_000)]])
        assert ray.wait([waiting], timeout=0.1) == ([], [waiting])
        ends[1].abort.remote(transport, step, "fwd_3__1 failed")
        error = outcome(waiting)
        assert isinstance(error, StepAborted)
        assert "fwd_3__1 failed" in str(error)
    step = next(fresh)
    ends[0].run.remote(send, transport, step, [[np.ones(9)]])
    ray.get(ends[1].run.remote(receive, transport, step, [0]), timeout=SECONDS)


def processor_seconds_of_waiting(end, router, step):
    start = time.process_time()
    router.recv(message(step, 0), [to_sharding((), end.submesh)])
    return time.process_time() - start


@pytest.mark.slow
@every_transport
def test_waiting_uses_no_processor_time(ends, transport):
    step = next(fresh)
    waiting = ends[1].run.remote(processor_seconds_of_waiting, transport, step)
    time.sleep(1.5)
    ends[0].run.remote(send, transport, step, [[np.ones(9)]])
    assert ray.get(waiting, timeout=SECONDS) < 0.3  # of which Ray's own threads have most


def shorten_the_wait_for_a_reason(end, router):
    inbox.ABORT_REASON_SECONDS = 0.5


@pytest.mark.slow
def test_a_dead_peer_ends_every_wait(ends):
    """The last test that uses the two processes."""
    ray.get(ends[1].run.remote(shorten_the_wait_for_a_reason, "device"), timeout=SECONDS)
    waiting = ends[1].run.remote(receive, "shared_memory", next(fresh), [0])
    time.sleep(0.2)
    ray.kill(ends[0])
    assert "group 0 is gone" in str(outcome(waiting))
    assert "group 0 is gone" in str(outcome(ends[1].run.remote(receive, "device", next(fresh), [0])))
    for transport in BOUNDED:
        call = ends[1].run.remote(send, transport, next(fresh), [[np.ones(90_000)]], (), 1)
        assert "group 0 is gone" in str(outcome(call))
