"""The actor that hosts one group: a thin shell over ``mpmd.runtime.worker.GroupWorker``."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import ray
from jax import export

from cluster.info import GroupInfo
from cluster.rpc import Server
from cluster.sockets import Address
from cluster.transports.edges import Edges, offered
from cluster.wire import Packed, pack, unpack
from mpmd.errors import TaskError
from mpmd.ir import Executable, Name, Plan, Run, Spec
from mpmd.runtime.transport import MessageId
from mpmd.runtime.worker import GroupWorker, Handle, StepReply, StepRequest

CONCURRENCY_GROUPS = {"control": 2, "watch": 1}
"""Threads beside the one for Ray's calls in order: for what must not queue behind them, or never ends."""


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A program as it travels to the actors: the resolved plan, and the functions as exported bytes.

    ``enable_x64`` is the driver's JAX setting; it decides whether 64-bit host arrays keep their dtype.
    """

    plan: Plan
    exported: Mapping[str, bytes]
    constants: Mapping[Name, np.ndarray]
    enable_x64: bool


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
        submesh = _submesh(mpmd_idx, submesh_shape)
        self._devices = tuple(str(device) for device in submesh.devices.flat)
        self._transports = offered(submesh.devices.flat[0].platform)
        self._edges = Edges(mpmd_idx, submesh)
        self._worker = GroupWorker(mpmd_idx, submesh, self._edges)
        self._shipments: dict[int, Shipment] = {}
        self._never = threading.Event()
        # The monotonic clock is this node's own; the wall clock is the one that nodes agree on.
        self._clock_offset = time.time() - time.perf_counter()

    def __repr__(self) -> str:
        return f"group {self._mpmd_idx}"  # how Ray labels this actor's log lines

    def listen(self, transports: Iterable[str], host: str, secret: bytes) -> dict[str, Any]:
        """Gets ready for the other groups to connect. Returns this group's address for each transport."""
        return self._edges.listen(transports, host, secret)

    def connect(self, routes: Mapping[int, str], addresses: Sequence[Mapping[str, Any]]) -> None:
        """Connects with the other groups, when all listen; ``routes`` names the transport to each."""
        self._edges.connect(routes, addresses)

    def await_driver(self, host: str, secret: bytes) -> Address:
        """Gets ready for the driver to dial, at the address that is returned; ``serve`` is to follow."""
        self._server = Server(repr(self), host, secret)
        return self._server.address

    @ray.method(concurrency_group="control")
    def ship(self, program: int, shipment: Shipment) -> None:
        """Takes in what ``load`` is to load."""
        self._shipments[program] = shipment

    def load(self, program: int) -> float:
        """Compiles this group's part of a shipment, and returns the seconds that XLA took.

        Raises ``TaskError`` with the label ``load`` when that fails.
        """
        shipment = self._shipments.pop(program)
        jax.config.update("jax_enable_x64", shipment.enable_x64)
        instructions = shipment.plan.programs[self._mpmd_idx].instructions
        needed = {i.executable for i in instructions if isinstance(i, Run)}
        here = {leaf.name for leaf in shipment.plan.constants if self._mpmd_idx in leaf.mpmd_idxs}
        try:
            functions = {name: _function(name, shipment.exported[name]) for name in needed}
            self._edges.trim()  # what is sent from now on may be of other sizes
            # The shipment lies in Ray's memory, and device_put may alias host memory: copy.
            constants = {name: np.array(shipment.constants[name]) for name in here}
            return self._worker.load(program, shipment.plan, functions, constants)
        except Exception as error:
            where = f"loading the program failed on group {self._mpmd_idx}"
            message = f"{where}: {type(error).__name__}: {error}"
            raise TaskError(message, self._mpmd_idx, "load") from error

    def output_specs(self, executable: Executable, exported: bytes) -> tuple[Spec, ...]:
        """The output specs that this group's compiler chooses for an executable."""
        return self._worker.output_specs(executable, _function(executable.name, exported))

    def step(self, request: StepRequest, puts: Mapping[Handle, Packed]) -> StepReply:
        """Runs one step; ``puts`` are those of the request, packed for the journey."""
        arrays = {handle: unpack(packed) for handle, packed in puts.items()}
        reply = self._worker.step(dataclasses.replace(request, puts=arrays))
        offset = self._clock_offset
        events = tuple(
            dataclasses.replace(event, start=event.start + offset, end=event.end + offset)
            for event in reply.events
        )
        return dataclasses.replace(reply, events=events)

    def fetch(self, handle: Handle) -> Packed:
        """The value under a handle, after the steps requested before."""
        return pack(np.asarray(self._worker.fetch(handle)))

    @ray.method(concurrency_group="control")
    def deliver(self, message: MessageId, packed: Sequence[Packed]) -> None:
        """Takes in a message of another group."""
        self._edges.deliver(message, packed)

    @ray.method(concurrency_group="control")
    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of a step, now and later."""
        self._edges.abort(step, reason)

    @ray.method(concurrency_group="control")
    def health(self) -> GroupInfo:
        """Answers at once, whatever the group is doing."""
        return self._info()

    @ray.method(concurrency_group="watch")
    def serve(self) -> None:
        """Does what the driver asks over its connection, as long as there is one.

        The call fails when the actor dies, which is how the driver notices.
        """
        self._server.serve(lambda method, arguments: getattr(self, method)(*arguments))

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """In place of ``serve``, where the driver calls the actor by Ray: never returns."""
        self._never.wait()

    def _info(self) -> GroupInfo:
        node, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return GroupInfo(self._mpmd_idx, node, node_id, os.getpid(), self._devices, self._transports)


def _keep_compiled(directory: str) -> None:
    """Has JAX write all that it compiles to a directory, and look there before it compiles.

    Unless the user has given JAX's own variable for that.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
        # By default only what took long is kept; a pipeline has many small executables.
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
