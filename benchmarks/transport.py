"""The speed of messages between groups, by transport and size.

Two actors on one machine, each on a core of its own as if both computed, send arrays to each other through
every transport; and, beside it, through memory that they share and a pipe, and through a TCP connection over
the loopback interface, with nothing around them (`raw` and `tcp`). `round trip` is from before a send to the
arrival of the answer, which is as large; `stream` is many messages of one step in a row, until the last is
taken; `memcpy` copies as many arrays within one process.
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

from benchmarks.measure import Conditions, Result, Table, Target, Times, interleaved, ratio
from benchmarks.peers import cpu_environment
from cluster.protocol.endpoint import endpoints
from cluster.tcp.credentials import Credentials, make_credentials
from cluster.transports.choice import NAMES, NETWORK, SHARED_MEMORY
from cluster.transports.router import Router
from mpmd.runtime.transport import MessageId
from mpmd.sharding import to_sharding

KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
QUICK = (4 * KIB, MIB)
RAW, MEMCPY = "raw round trip", "memcpy"
TCP = "tcp"
ENCRYPTED = f"{NETWORK}, encrypted"
WAYS = {**{name: name for name in NAMES}, ENCRYPTED: NETWORK}
"""The transport of each way that is measured."""
WAIT_SECONDS = 1.0

_most_bytes = 32 * MIB
_most_messages = 50


class End:
    """One of two processes that send to each other."""

    def __init__(
        self,
        index: int,
        directory: str,
        shared_bytes: int,
        credentials: dict[bool, Credentials],
        ways: Mapping[str, str],
    ):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
        self.index, self.peer = index, 1 - index
        self.submesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("stage",))
        self.routers = {name: Router(endpoints([1, 1])[index], self.submesh) for name in ways}
        self._ways = ways
        self.directory, self.shared_bytes = directory, shared_bytes
        self.credentials = credentials

    def listen(self) -> dict[str, object]:
        addresses: dict[str, object] = {}
        for way, router in self.routers.items():
            credentials = self.credentials[way == ENCRYPTED]
            addresses[way] = router.listen([self._ways[way]], "127.0.0.1", credentials)
        self.listener = socket.create_server(("127.0.0.1", 0))
        return {**addresses, TCP: self.listener.getsockname()}

    def connect(self, addresses: list[dict[str, Any]]) -> None:
        for way, router in self.routers.items():
            router.connect({self.peer: self._ways[way]}, [each[way] for each in addresses])
        with self.listener:
            if self.index:
                self.tcp, _ = self.listener.accept()
            else:
                self.tcp = socket.create_connection(addresses[self.peer][TCP])
        self.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with open(f"{self.directory}/memory", "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), self.shared_bytes), np.uint8)
        self.memory = np.split(memory, 2)[self.index]
        flags = (os.O_RDONLY, os.O_WRONLY) if self.index else (os.O_WRONLY, os.O_RDONLY)
        pipes = [os.open(f"{self.directory}/pipe{i}", flag) for i, flag in enumerate(flags)]
        self.outlet, self.inlet = reversed(pipes) if self.index else pipes

    def _arrays(self, size: int, count: int) -> list[jax.Array]:
        sharding = to_sharding((), self.submesh)
        return [
            jax.device_put(np.full(size // 4, i, np.float32), sharding, may_alias=False) for i in range(count)
        ]

    def _send(self, name: str, step: int, tag: int, array: jax.Array | np.ndarray) -> None:
        self.routers[name].send(MessageId(step, self.index, self.peer, tag), [array])

    def _take(self, name: str, step: int, tag: int) -> jax.Array | np.ndarray:
        wanted = [to_sharding((), self.submesh)]
        return self.routers[name].recv(MessageId(step, self.peer, self.index, tag), wanted)[0]

    def round_trip(self, name: str, step: int, size: int, count: int) -> float:
        """Seconds; the median of so many."""
        (array,) = self._arrays(size, 1)

        def exchange(tag: int) -> None:
            if self.index:
                self._send(name, step, tag, self._take(name, step, tag))
            else:
                self._send(name, step, tag, array)
                self._take(name, step, tag)

        return _median_seconds(exchange, count)

    def raw_round_trip(self, size: int, count: int) -> float:
        """The same with nothing but memory and a pipe."""
        source, destination = np.ones(size, np.uint8), self.memory[:size]

        def exchange(_: int) -> None:
            if self.index:
                os.read(self.inlet, 1)
            destination[:] = source
            os.write(self.outlet, b"!")
            if not self.index:
                os.read(self.inlet, 1)

        return _median_seconds(exchange, count)

    def tcp_round_trip(self, size: int, count: int) -> float:
        """The same with nothing but a TCP connection."""
        source, destination = np.ones(size, np.uint8), np.ones(size, np.uint8)

        def exchange(_: int) -> None:
            if self.index:
                self._fill(destination)
            self.tcp.sendall(source)
            if not self.index:
                self._fill(destination)

        return _median_seconds(exchange, count)

    def tcp_stream(self, size: int, count: int) -> float:
        """Seconds per message, of which the receiver has but one buffer."""
        buffer = np.ones(size, np.uint8)
        start = time.perf_counter()
        if self.index:
            for _ in range(count):
                self._fill(buffer)
            self.tcp.sendall(b"done")
        else:
            for _ in range(count):
                self.tcp.sendall(buffer)
            self.tcp.recv(4, socket.MSG_WAITALL)
        return (time.perf_counter() - start) / count

    def _fill(self, buffer: np.ndarray) -> None:
        received = self.tcp.recv_into(buffer, buffer.nbytes, socket.MSG_WAITALL)
        assert received == buffer.nbytes, f"{received} of {buffer.nbytes} bytes have arrived"

    def stream(self, name: str, step: int, size: int, count: int) -> float:
        """Seconds per message."""
        arrays = self._arrays(size, 0 if self.index else count)
        (answer,) = self._arrays(4, 1)
        start = time.perf_counter()
        if self.index:
            for tag in range(count):
                taken = self._take(name, step, tag)
            jax.block_until_ready(taken)
            self._send(name, step, 0, answer)
        else:
            for tag, array in enumerate(arrays):
                self._send(name, step, tag, array)
            self._take(name, step, 0)
        return (time.perf_counter() - start) / count

    def memcpy(self, size: int, count: int) -> float:
        """Seconds per copy, from as many arrays to as many as there are messages in a stream."""
        sources, destinations = np.ones((2, count, size), np.uint8)
        start = time.perf_counter()
        for source, destination in zip(sources, destinations, strict=True):
            destination[:] = source
        return (time.perf_counter() - start) / count

    def wait(self, name: str, step: int) -> float:
        """Seconds of processor time that waiting for a message takes."""
        start = time.process_time()
        self._take(name, step, 0)
        return time.process_time() - start

    def send_later(self, name: str, step: int, seconds: float) -> None:
        time.sleep(seconds)
        self._send(name, step, 0, *self._arrays(4, 1))

    @ray.method(concurrency_group="control")
    def deliver(self, message: MessageId, packed: list) -> None:
        self.routers["object_store"].deliver(message, packed)


def _median_seconds(exchange: Callable[[int], None], count: int) -> float:
    seconds = []
    for tag in range(count):
        start = time.perf_counter()
        exchange(tag)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


Ends = Sequence[Any]
"""The two actors."""

_steps = itertools.count()


def run(conditions: Conditions) -> Result:
    sizes = QUICK if conditions.quick else SIZES
    with connected(2 * max(sizes), cpu_environment(1, 1)) as ends:
        found = {size: _measure(ends, size, conditions.effort.repetitions) for size in sizes}
        waits = {name: _wait(ends, name) for name in WAYS}
    tables = [_round_trips(found), _streams(found), _over_tcp(found), _waits(waits)]
    data = {"seconds": {str(size): times for size, times in found.items()}, "processor_seconds": waits}
    return Result(tables, _targets(found), data)


@contextlib.contextmanager
def connected(
    shared_bytes: int, environment: Mapping[str, str], ways: Mapping[str, str] = WAYS, gpus: float = 0
) -> Iterator[Ends]:
    """Two processes that are connected.

    Args:
      shared_bytes: of the memory that they share for `raw`.
      environment: their variables.
      ways: the transport of each way to connect them.
      gpus: that each reserves.
    """
    actor = ray.remote(concurrency_groups={"control": 1}, num_cpus=0, num_gpus=gpus)(End)  # type: ignore[call-overload]
    runtime_env = {"env_vars": dict(environment)}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for i in range(2):
            os.mkfifo(f"{directory}/pipe{i}")
        with open(f"{directory}/memory", "wb") as file:
            file.truncate(shared_bytes)
        credentials = {encryption: make_credentials(encryption) for encryption in (False, True)}
        ends = [
            actor.options(runtime_env=runtime_env).remote(i, directory, shared_bytes, credentials, ways)
            for i in range(2)
        ]
        addresses = ray.get([end.listen.remote() for end in ends])
        ray.get([end.connect.remote(addresses) for end in ends])
        yield ends
        for end in ends:
            ray.kill(end)


def _measure(ends: Ends, size: int, repetitions: int) -> dict[str, Times]:
    """Seconds of every kind for one size; what is measured first only warms up."""
    count = max(4, min(_most_messages, _most_bytes // size))
    things: dict[str, Callable[[], float]] = {
        RAW: lambda: on_both(ends, "raw_round_trip", size, count),
        f"{TCP} round_trip": lambda: on_both(ends, "tcp_round_trip", size, count),
        f"{TCP} stream": lambda: on_both(ends, "tcp_stream", size, count),
        MEMCPY: lambda: ray.get(ends[0].memcpy.remote(size, count)),
    }
    for name in WAYS:
        for kind in ("round_trip", "stream"):
            things[f"{name} {kind}"] = functools.partial(in_a_step, ends, kind, name, size, count)
    return {kind: times[1:] for kind, times in interleaved(things, repetitions + 1).items()}


def in_a_step(ends: Ends, method: str, name: str, *arguments: int) -> float:
    """The measurement of the first by a method of both, such as ``round_trip``, with a step of its own."""
    return on_both(ends, method, name, next(_steps), *arguments)


def on_both(ends: Ends, method: str, *arguments: object) -> float:
    """Calls both at the same time; what the first one measures."""
    return ray.get([getattr(end, method).remote(*arguments) for end in ends])[0]


def _wait(ends: Ends, name: str) -> float:
    step = next(_steps)
    waiting = ends[0].wait.remote(name, step)
    ends[1].send_later.remote(name, step, WAIT_SECONDS)
    return ray.get(waiting)


Found = Mapping[int, Mapping[str, Times]]


def _round_trips(found: Found) -> Table:
    rows = [
        (
            size_text(size),
            _us(times[RAW]),
            *(_against(times[f"{name} round_trip"], times[RAW], "{:.1f}x") for name in (TCP, *WAYS)),
        )
        for size, times in found.items()
    ]
    return Table("Transport: round trips", ("us (times raw)", "raw", TCP, *WAYS), tuple(rows))


def _streams(found: Found) -> Table:
    rows = [
        (
            size_text(size),
            _us(times[MEMCPY]),
            *(
                f"{_us(stream)} ({ratio(times[MEMCPY], stream):.0%})"
                for stream in (times[f"{name} stream"] for name in (TCP, *WAYS))
            ),
        )
        for size, times in found.items()
    ]
    header = ("us per message (of the bandwidth of memcpy)", MEMCPY, TCP, *WAYS)
    return Table("Transport: streams", header, tuple(rows))


def _over_tcp(found: Found) -> Table:
    """The transports that can connect nodes, beside the connection itself."""
    names = [name for name in WAYS if name != SHARED_MEMORY]
    rows = []
    for size, times in found.items():
        tcp = times[f"{TCP} stream"]
        streams = [times[f"{name} stream"] for name in names]
        cells = [f"{_us(stream)} ({ratio(tcp, stream):.0%})" for stream in streams]
        rows.append((size_text(size), _us(tcp), *cells))
    header = ("us per message (of the bandwidth of TCP)", TCP, *names)
    return Table("Transport: streams over TCP", header, tuple(rows))


def _waits(waits: Mapping[str, float]) -> Table:
    row = (f"{WAIT_SECONDS:g} s", *(f"{seconds * 1e3:.1f}" for seconds in waits.values()))
    return Table("Transport: waiting", ("ms of processor time", *waits), (row,))


def _targets(found: Found) -> list[Target]:
    targets = []
    for size, times in found.items():
        what = f"shared_memory, {size_text(size)}"
        if size == 4 * KIB:
            trip = ratio(times["shared_memory round_trip"], times[RAW])
            targets.append(Target(f"{what}: round trip / raw", trip, 3.0))
        if size >= MIB:
            share = ratio(times[MEMCPY], times["shared_memory stream"])
            targets.append(Target(f"{what}: of the bandwidth of memcpy", share, 0.6, at_least=True))
            share = ratio(times[f"{TCP} stream"], times[f"{NETWORK} stream"])
            of_tcp = f"{NETWORK}, {size_text(size)}: of the bandwidth of TCP"
            targets.append(Target(of_tcp, share, 0.5, at_least=True))
    return targets


def _us(times: Times) -> str:
    return f"{statistics.median(times) * 1e6:.1f}"


def _against(times: Times, others: Times, form: str) -> str:
    return f"{_us(times)} ({form.format(ratio(times, others))})"


def size_text(size: int) -> str:
    """A size in KiB or MiB."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
