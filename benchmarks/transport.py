"""The speed of messages between groups, by transport and size.

Two actors on one machine, each on a core of its own as if both computed, send arrays to each other through
every transport; and, beside it, through shared memory with a pipe, and through a TCP connection over the
loopback interface, with nothing around them (`raw` and `tcp`). A round trip ends with the arrival of the
answer, which is as large. A stream is many messages of one step in a row, until the last is taken. `memcpy`
copies as many arrays within one process. On an accelerator the arrays are on it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import ray

from benchmarks.frame import Cell, Limited, Rows, Setup, Times, interleaved, ratio, scaled
from cluster.protocol.endpoint import endpoints
from cluster.start.environment import gpu_memory
from cluster.tcp.credentials import Credentials, make_credentials
from cluster.transports import choice
from cluster.transports.choice import DEVICE, NAMES, NETWORK, SHARED_MEMORY
from cluster.transports.router import Router
from mpmd.ir.reshard import GroupShape
from mpmd.runtime.transport import MessageId
from mpmd.sharding import to_sharding

KIB, MIB = 2**10, 2**20
SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "128 MiB": 128 * MIB}
"""Of messages: the largest is for accelerators, the smallest for hosts."""

RAW, TCP, MEMCPY = "raw", "tcp", "memcpy"
ENCRYPTED = f"{NETWORK}, encrypted"
WAYS = {**{name: name for name in NAMES}, ENCRYPTED: NETWORK}
"""The transport of each way that is measured, beside ``RAW`` and ``TCP``."""

WAIT_SECONDS = 1.0
MOST_BYTES, MOST_MESSAGES = 32 * MIB, 50
ROUND_TRIP, STREAM = "round_trip", "stream"
RAW_ROUND_TRIPS, OF_MEMCPY, OF_TCP = 3.0, 0.6, 0.5
"""Limits: round trips of 4 KiB over raw ones at most; shares of bandwidth at 1 MiB and more at least."""


class Raw:
    """Memory that two processes share, and a pipe in each direction to say that it has been written."""

    def __init__(self, memory: np.ndarray, inlet: int, outlet: int):
        self._memory, self._inlet, self._outlet = memory, inlet, outlet

    def values(self, size: int, count: int) -> Sequence[Any]:
        return np.ones((count, size), np.uint8)

    def send(self, step: int, tag: int, value: Any) -> None:
        self._memory[: len(value)] = value
        os.write(self._outlet, b"!")

    def take(self, step: int, tag: int, size: int) -> Any:
        os.read(self._inlet, 1)
        return self._memory[:size]


class Tcp:
    """A TCP connection, whose receiver has one buffer."""

    def __init__(self, connection: socket.socket, most_bytes: int):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._buffer = connection, np.ones(most_bytes, np.uint8)

    def values(self, size: int, count: int) -> Sequence[Any]:
        return np.ones((count, size), np.uint8)

    def send(self, step: int, tag: int, value: Any) -> None:
        self._connection.sendall(value)

    def take(self, step: int, tag: int, size: int) -> Any:
        received = self._connection.recv_into(self._buffer, size, socket.MSG_WAITALL)
        assert received == size, f"{received} of {size} bytes have arrived"
        return self._buffer[:size]


class Routed:
    """A transport of ``cluster``."""

    def __init__(self, router: Router, submesh: jax.sharding.Mesh, index: int):
        self._router, self._index = router, index
        self._sharding = to_sharding((), submesh)

    def values(self, size: int, count: int) -> Sequence[Any]:
        return [
            jax.device_put(np.full(size // 4, i, np.float32), self._sharding, may_alias=False)
            for i in range(count)
        ]

    def send(self, step: int, tag: int, value: Any) -> None:
        self._router.send(MessageId(step, self._index, 1 - self._index, tag), [value])

    def take(self, step: int, tag: int, size: int) -> Any:
        message = MessageId(step, 1 - self._index, self._index, tag)
        return self._router.recv(message, [self._sharding])[0]


class End:
    """One of two processes that send to each other."""

    def __init__(
        self,
        index: int,
        directory: str,
        shared_bytes: int,
        credentials: Mapping[bool, Credentials],
        ways: Mapping[str, str],
    ):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
        self.index, self.directory, self.shared_bytes = index, directory, shared_bytes
        self.credentials, self.ways = credentials, ways
        self.submesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("stage",))
        endpoint = endpoints([GroupShape({"stage": 1})] * 2)[index]
        self.routers = {way: Router(endpoint, self.submesh) for way in ways}

    def listen(self) -> dict[str, Any]:
        addresses: dict[str, Any] = {
            way: router.listen([choice.TCP, self.ways[way]], "127.0.0.1", self.credentials[way == ENCRYPTED])
            for way, router in self.routers.items()
        }
        self.listener = socket.create_server(("127.0.0.1", 0))
        return {**addresses, TCP: self.listener.getsockname()}

    def connect(self, addresses: Sequence[Mapping[str, Any]]) -> None:
        peer = 1 - self.index
        for way, router in self.routers.items():
            router.connect({peer: self.ways[way]}, [each[way] for each in addresses])
        with self.listener:
            if self.index:
                connection, _ = self.listener.accept()
            else:
                connection = socket.create_connection(addresses[peer][TCP])
        with open(f"{self.directory}/memory", "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 2 * self.shared_bytes), np.uint8)
        flags = (os.O_RDONLY, os.O_WRONLY) if self.index else (os.O_WRONLY, os.O_RDONLY)
        pipes = [os.open(f"{self.directory}/pipe{i}", flag) for i, flag in enumerate(flags)]
        outlet, inlet = reversed(pipes) if self.index else pipes
        self.channels: dict[str, Raw | Tcp | Routed] = {
            RAW: Raw(np.split(memory, 2)[self.index], inlet, outlet),
            TCP: Tcp(connection, self.shared_bytes),
            **{way: Routed(router, self.submesh, self.index) for way, router in self.routers.items()},
        }

    def _channel(self, way: str, step: int) -> Any:
        if way in self.routers:
            self.routers[way].begin_step(step)
        return self.channels[way]

    def round_trip(self, way: str, step: int, size: int, count: int) -> float:
        """Returns the median seconds of ``count`` round trips."""
        channel, seconds = self._channel(way, step), []
        (value,) = channel.values(size, 1)
        for tag in range(count):
            start = time.perf_counter()
            if self.index:
                channel.send(step, tag, channel.take(step, tag, size))
            else:
                channel.send(step, tag, value)
                channel.take(step, tag, size)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def stream(self, way: str, step: int, size: int, count: int) -> float:
        """Returns the seconds per message."""
        channel = self._channel(way, step)
        values = channel.values(size, 0 if self.index else count)
        (answer,) = channel.values(4, 1)
        start = time.perf_counter()
        if self.index:
            for tag in range(count):
                taken = channel.take(step, tag, size)
            jax.block_until_ready(taken)
            channel.send(step, 0, answer)
        else:
            for tag, value in enumerate(values):
                channel.send(step, tag, value)
            channel.take(step, 0, 4)
        return (time.perf_counter() - start) / count

    def memcpy(self, size: int, count: int) -> float:
        """Returns the seconds per copy, from as many arrays to as many as a stream has messages."""
        sources, destinations = np.ones((2, count, size), np.uint8)
        start = time.perf_counter()
        for source, destination in zip(sources, destinations, strict=True):
            destination[:] = source
        return (time.perf_counter() - start) / count

    def wait(self, way: str, step: int) -> float:
        """Returns the seconds of processor time that waiting for a message takes."""
        channel, start = self._channel(way, step), time.process_time()
        channel.take(step, 0, 4)
        return time.process_time() - start

    def send_later(self, way: str, step: int) -> None:
        time.sleep(WAIT_SECONDS)
        channel = self._channel(way, step)
        channel.send(step, 0, channel.values(4, 1)[0])

    @ray.method(concurrency_group="control")
    def deliver(self, message: MessageId, packed: list) -> None:
        self.routers["object_store"].deliver(message, packed)


Ends = Sequence[Any]
"""The two actors."""

_steps = itertools.count()


def run(setup: Setup) -> Rows:
    on_device = setup.options.device
    names = list(SIZES)[1:] if on_device else list(SIZES)[:-1]
    ways = {NETWORK: NETWORK, DEVICE: DEVICE} if on_device else WAYS
    chosen = {name: SIZES[name] for name in setup.cases(names, [names[0], "1 MiB"])}
    with connected(setup, max(chosen.values(), default=KIB), ways) as ends:
        for message, size in chosen.items():
            times = _measure(ends, ways, size, setup.repetitions)
            for way in (RAW, TCP, *ways):
                yield "Messages", {"message": message, "by": way, **_cells(size, way, times)}
            yield "Messages", {"message": message, "by": MEMCPY, "us in a stream": scaled(times[MEMCPY], 1e6)}
        for way in ways:
            step = next(_steps)
            waiting = ends[0].wait.remote(way, step)
            ends[1].send_later.remote(way, step)
            seconds = ray.get(waiting)
            yield "Waiting", {"for a message by": way, "ms of processor time in a second": 1e3 * seconds}


@contextlib.contextmanager
def connected(setup: Setup, shared_bytes: int, ways: Mapping[str, str]) -> Iterator[Ends]:
    """Two processes that are connected in all ways, with this much memory for ``RAW`` in each direction."""
    setup.join_ray()
    gpus = setup.gpus_per_group or 0.0
    actor = ray.remote(concurrency_groups={"control": 1}, num_cpus=0, num_gpus=gpus)(End)  # type: ignore[call-overload]
    variables = setup.environment(1, 1) | (gpu_memory({}, gpus, shares=False) if gpus else {})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for i in range(2):
            os.mkfifo(f"{directory}/pipe{i}")
        with open(f"{directory}/memory", "wb") as file:
            file.truncate(2 * shared_bytes)
        credentials = {encryption: make_credentials(encryption) for encryption in (False, True)}
        ends = [
            actor.options(runtime_env={"env_vars": variables}).remote(
                i, directory, shared_bytes, credentials, ways
            )
            for i in range(2)
        ]
        addresses = ray.get([end.listen.remote() for end in ends])
        ray.get([end.connect.remote(addresses) for end in ends])
        yield ends
        for end in ends:
            ray.kill(end)


def _measure(ends: Ends, ways: Mapping[str, str], size: int, repetitions: int) -> dict[str, Times]:
    """Returns the seconds of each way and kind for one size, without the first repetition, which warms up."""
    count = max(4, min(MOST_MESSAGES, MOST_BYTES // size))
    things: dict[str, Callable[[], float]] = {MEMCPY: lambda: ray.get(ends[0].memcpy.remote(size, count))}
    for way in (RAW, TCP, *ways):
        for kind in (ROUND_TRIP, STREAM) if way != RAW else (ROUND_TRIP,):
            things[f"{way} {kind}"] = functools.partial(_on_both, ends, kind, way, size, count)
    return {kind: times[1:] for kind, times in interleaved(things, repetitions + 1).items()}


def _on_both(ends: Ends, kind: str, way: str, size: int, count: int) -> float:
    """Calls a method of both actors at the same time; returns the result of the first."""
    step = next(_steps)
    return ray.get([getattr(end, kind).remote(way, step, size, count) for end in ends])[0]


def _cells(size: int, way: str, times: Mapping[str, Times]) -> dict[str, Cell]:
    trips = times[f"{way} {ROUND_TRIP}"]
    of_raw = ratio(trips, times[f"{RAW} {ROUND_TRIP}"])
    cells: dict[str, Cell] = {"us, there and back": scaled(trips, 1e6), "times raw": of_raw}
    if way == SHARED_MEMORY and size == 4 * KIB:
        cells["times raw"] = Limited(of_raw, RAW_ROUND_TRIPS)
    if way != RAW:
        stream = times[f"{way} {STREAM}"]
        of_memcpy, of_tcp = (ratio(times[of], stream) for of in (MEMCPY, f"{TCP} {STREAM}"))
        is_large = size >= MIB
        cells["us in a stream"] = scaled(stream, 1e6)
        cells["GB/s"] = size / statistics.median(stream) / 1e9
        cells["bandwidth, of memcpy"] = (
            Limited(of_memcpy, OF_MEMCPY, at_least=True) if is_large and way == SHARED_MEMORY else of_memcpy
        )
        cells["of tcp"] = Limited(of_tcp, OF_TCP, at_least=True) if is_large and way == NETWORK else of_tcp
    return cells
