"""The actor that hosts one group: makes ``mpmd.runtime.worker.GroupWorker`` callable from the driver."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import ray
from jax import export

from cluster.group_info import GroupInfo
from cluster.packing import PackedArray, pack, unpack
from cluster.rpc import Server
from cluster.sockets import Address
from cluster.transports.choice import supported
from cluster.transports.router import Router
from mpmd.errors import TaskError
from mpmd.ir import Executable, Name, Plan, Spec
from mpmd.program import Variant
from mpmd.runtime.requests import NOTHING_RELEASED, Handle, Released, StepReply, StepRequest
from mpmd.runtime.transport import MessageId
from mpmd.runtime.worker import GroupWorker

CONCURRENCY_GROUPS = {"control": 2, "watch": 1}
"""The threads beside the one for calls in order: for calls that must not wait for those, or never end."""


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A program as it travels to the actors: the resolved plan, and the functions as exported bytes.

    ``compiled`` are the executables that the actors have compiled already, and whose functions do not travel.
    """

    plan: Plan
    exported: Mapping[str, bytes]
    constants: Mapping[Name, np.ndarray]
    compiled: Mapping[str, Variant]


class GroupActor:
    """One group. ``cluster.launch`` starts one for each, and sets its environment before JAX is imported.

    Args:
      mpmd_idx: the group.
      submesh_shape: axis names and sizes of its submesh, the mpmd axis with size 1.
      compilation_cache: a directory of this node for what XLA has compiled, or ``None``.
    """

    def __init__(self, mpmd_idx: int, submesh_shape: Mapping[str, int], compilation_cache: str | None):
        self._mpmd_idx = mpmd_idx
        if compilation_cache is not None:
            _keep_compiled(compilation_cache)
        # Each task is waited for where the host's cores run it: another thread for it would only cost time.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        # Programs arrive with the dtype of every value. Whatever the driver's setting was when each of them
        # was traced, no value is to be narrowed here, in any thread.
        jax.config.update("jax_enable_x64", True)
        submesh = _submesh(mpmd_idx, submesh_shape)
        self._devices = tuple(str(device) for device in submesh.devices.flat)
        self._transports = supported(submesh.devices.flat[0].platform)
        self._router = Router(mpmd_idx, submesh)
        self._worker = GroupWorker(mpmd_idx, submesh, self._router)
        self._server: Server | None = None
        self._shipping = threading.Lock()
        self._shipments: dict[int, Shipment] = {}
        self._cancelled: set[int] = set()  # the shipments that the driver gave up before they arrived
        self._forever = threading.Event()
        # The monotonic clock is this node's own; the wall clocks of nodes agree.
        self._clock_offset = time.time() - time.perf_counter()

    def __repr__(self) -> str:
        return f"group {self._mpmd_idx}"  # how Ray labels this actor's log lines

    def listen(self, transports: Iterable[str], host: str, secret: bytes) -> dict[str, Any]:
        """Gets ready for the other groups to connect. Returns this group's address for each transport."""
        return self._router.listen(transports, host, secret)

    def connect(self, routes: Mapping[int, str], addresses: Sequence[Mapping[str, Any]]) -> None:
        """Connects with the other groups, when all listen; ``routes`` names the transport to each."""
        self._router.connect(routes, addresses)

    def await_driver(self, host: str, secret: bytes) -> Address:
        """Opens the port to which the driver connects, and returns its address. Call ``serve`` next."""
        self._server = Server(repr(self), host, secret)
        return self._server.address

    @ray.method(concurrency_group="control")
    def ship(self, number: int, shipment: Shipment) -> None:
        """Takes in what ``load`` is to load."""
        with self._shipping:
            if number in self._cancelled:
                self._cancelled.remove(number)
            else:
                self._shipments[number] = shipment

    def load(self, number: int) -> float:
        """Compiles this group's part of a shipment, and returns the seconds that XLA took.

        Raises ``TaskError`` with the label ``load`` when that fails; then call ``release``.
        """
        shipment = self._shipments[number]
        names = [executable.name for executable in shipment.plan.executables_of(self._mpmd_idx)]
        needed = [name for name in names if name not in shipment.compiled]
        here = [leaf.name for leaf in shipment.plan.constants_of(self._mpmd_idx)]
        with self._naming_failures():
            functions = {name: _function(name, shipment.exported[name]) for name in needed}
            self._router.trim()  # what is sent from now on may be of other sizes
            # The shipment is in Ray's memory, which device_put may alias: copy.
            constants = {name: np.array(shipment.constants[name]) for name in here}
            seconds = self._worker.load(number, shipment.plan, functions, constants, shipment.compiled)
        del self._shipments[number]
        return seconds

    def compile(self, number: int, executable: Executable, exported: bytes) -> tuple[Spec, ...]:
        """Compiles an executable of a program that ``load`` will load, and returns its output specs.

        Raises ``TaskError`` as ``load`` does.
        """
        with self._naming_failures():
            return self._worker.compile(number, executable, _function(executable.name, exported))

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            where = f"loading the program failed on group {self._mpmd_idx}"
            message = f"{where}: {type(error).__name__}: {error}"
            raise TaskError(message, self._mpmd_idx, "load") from error

    def run_step(self, request: StepRequest, packed: Mapping[Handle, PackedArray]) -> StepReply:
        """Runs one step; ``packed`` are the request's host arrays."""
        self._router.begin_step(request.step)
        arrays = {handle: self._owned(unpack(value)) for handle, value in packed.items()}
        self.release(request.released)
        request = dataclasses.replace(request, host_arrays=arrays, released=NOTHING_RELEASED)
        reply = self._worker.run_step(request)
        offset = self._clock_offset
        events = tuple(
            dataclasses.replace(event, start=event.start + offset, end=event.end + offset)
            for event in reply.events
        )
        return dataclasses.replace(reply, events=events)

    def _owned(self, array: np.ndarray) -> np.ndarray:
        """An array for the group to keep: a copy where Ray has brought it, because Ray reuses its memory."""
        return array.copy() if self._server is None else array

    def release(self, released: Released) -> None:
        """Drops values and programs, also those that were shipped and not loaded."""
        with self._shipping:
            for number in released.programs:
                if self._shipments.pop(number, None) is None and not self._worker.has_program(number):
                    self._cancelled.add(number)
        self._worker.release(released)

    def fetch(self, handle: Handle) -> PackedArray:
        """The value under a handle, after the steps requested before."""
        return pack(np.asarray(self._worker.fetch(handle)))

    @ray.method(concurrency_group="control")
    def deliver(self, message: MessageId, packed: Sequence[PackedArray]) -> None:
        """Takes in a message of another group."""
        self._router.deliver(message, packed)

    @ray.method(concurrency_group="control")
    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of a step, now and later."""
        self._router.abort(step, reason)

    @ray.method(concurrency_group="control")
    def health(self) -> GroupInfo:
        """Answers at once, whatever the group is doing."""
        return self._info()

    @ray.method(concurrency_group="watch")
    def serve(self) -> None:
        """Answers the driver's requests over its connection, as long as there is one.

        The call fails when the actor dies, which is how the driver notices.
        """
        assert self._server is not None, "await_driver comes first"
        self._server.serve(lambda method, arguments: getattr(self, method)(*arguments))

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """In place of ``serve``, where the driver calls the actor by Ray: never returns."""
        self._forever.wait()

    def _info(self) -> GroupInfo:
        node, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return GroupInfo(
            mpmd_idx=self._mpmd_idx,
            node=node,
            node_id=node_id,
            pid=os.getpid(),
            devices=self._devices,
            transports=self._transports,
        )


def _keep_compiled(directory: str) -> None:
    """Has JAX write all that it compiles to a directory, and look there before it compiles.

    A directory that the user has named in JAX's own variable stays.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
        # By default JAX keeps only what took long to compile; a pipeline has many small executables.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _submesh(mpmd_idx: int, shape: Mapping[str, int]) -> jax.sharding.Mesh:
    sizes = tuple(shape.values())
    needed = int(np.prod(sizes))
    devices = jax.devices()
    if len(devices) < needed:
        raise RuntimeError(
            f"group {mpmd_idx} needs {needed} devices for its submesh {dict(shape)}, "
            f"but its process has {len(devices)}: {', '.join(map(str, devices))}"
        )
    return jax.sharding.Mesh(np.array(devices[:needed]).reshape(sizes), tuple(shape))


def _function(name: str, exported: bytes) -> Callable[..., tuple[jax.Array, ...]]:
    call = export.deserialize(bytearray(exported)).call

    def function(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(call(*arguments))

    function.__name__ = name  # what profilers and compiler dumps show
    return function
