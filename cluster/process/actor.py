"""The actor of a process of a group: answers the driver by a ``GroupWorker``."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import ray

from cluster.process import world
from cluster.process.agreement import Agreement
from cluster.process.array_slices import assemble
from cluster.process.compilation_cache import keep_compiled
from cluster.process.slices import SliceTransport
from cluster.protocol.endpoint import DRIVER, Endpoint
from cluster.protocol.packing import PackedArray, PackedValue, pack, unpack
from cluster.protocol.process_info import Location, ProcessInfo
from cluster.protocol.shipment import Compile, Load, Shipment, exported_function
from cluster.protocol.versions import versions_here
from cluster.tcp.credentials import Credentials
from cluster.tcp.rpc import Server
from cluster.transports.choice import supported
from cluster.transports.router import Router
from mpmd.errors import StepAborted, TaskError
from mpmd.ir.plan import Aval, Edge, Plan
from mpmd.ir.reshard import GroupShape, box_of
from mpmd.ir.routes import Routes, Topology
from mpmd.program import Program
from mpmd.runtime.activity import Activity, Doing, Loading
from mpmd.runtime.compiling import LoadReply
from mpmd.runtime.executor import put
from mpmd.runtime.lost_values import DONATED_IN_PROCESS
from mpmd.runtime.requests import Fetch, Release, Released, Request, StepReply, StepRequest
from mpmd.runtime.transport import MessageId, Transport
from mpmd.runtime.worker import GroupWorker

_OF_DONATED = f"{DONATED_IN_PROCESS}, as they would with mpmd.launch(..., recovery=mpmd.Recovery())"


class GroupActor:
    """A process of a group. ``mpmd.launch`` starts it, and sets its environment before JAX is imported.

    It is ready for programs after ``open``, ``listen`` and ``connect``.

    Args:
      endpoint: which process of which group it is.
      compilation_cache: a directory of this node for what XLA has compiled, or ``None``.
    """

    CONCURRENCY_GROUPS: ClassVar[Mapping[str, int]] = {"control": 2, "watch": 1, "storage": 1}
    """Threads for calls that must not wait for the calls in order, or that never end."""

    def __init__(self, endpoint: Endpoint, compilation_cache: str | None):
        self._endpoint = endpoint
        self._compilation_cache = compilation_cache
        # Each task is waited for where the host's cores run it: another thread for it would only cost time.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        # Programs arrive with the dtype of every value. Whatever the driver's setting was when each of them
        # was traced, no value is to be narrowed here, in any thread.
        jax.config.update("jax_enable_x64", True)
        self._activity = Activity()
        self._reserved: socket.socket | None = None
        self._server: Server | None = None
        self._last_run = -1
        self._shipments: dict[int, Shipment] = {}
        self._forever = threading.Event()

    def __repr__(self) -> str:
        return self._endpoint.name  # Ray labels log lines with it

    def locate(self) -> Location:
        """The location of this process, before JAX has looked for devices."""
        port = None
        if self._endpoint.rank == 0 and self._endpoint.shape.num_processes > 1:
            self._reserved = world.reserve_port()
            port = self._reserved.getsockname()[1]
        node_id = ray.get_runtime_context().get_node_id()
        return Location(ray.util.get_node_ip_address(), node_id, port, versions_here())

    def open(self, coordinator: world.Address | None, host: str, timeout: float) -> ProcessInfo:
        """Takes the group's devices.

        Args:
          coordinator: where the processes of the group meet; ``None`` for a group of one process.
          host: this process's own address.
          timeout: seconds to wait for the other processes.

        Raises: ``RuntimeError`` when the processes do not meet, do not have the devices that they should, or
          would execute files that another user may have written.
        """
        keep_compiled(self._compilation_cache)
        shape = self._endpoint.shape
        if coordinator is not None:
            with self._reserved or contextlib.nullcontext():
                world.join(coordinator, shape.num_processes, self._endpoint.rank, host, timeout)
        submesh = _submesh_of(self._endpoint)
        self._router = Router(self._endpoint, submesh)
        self._agreement = Agreement(self._endpoint.rank, self._activity)
        self._worker = GroupWorker(
            mpmd_idx=self._endpoint.mpmd_idx,
            submesh=submesh,
            transport_of=self._transport_of,
            put=self._put,
            agree=self._agreement.agree,
            activity=self._activity,
            of_donated=_OF_DONATED,
            rank=self._endpoint.rank,
            is_alone=True,
        )
        context = ray.get_runtime_context()
        return ProcessInfo(
            mpmd_idx=self._endpoint.mpmd_idx,
            rank=self._endpoint.rank,
            node=ray.util.get_node_ip_address(),
            node_id=context.get_node_id(),
            pid=os.getpid(),
            devices=tuple(map(str, submesh.local_devices)),
            transports=supported(submesh.devices.flat[0].platform),
            log=_log_file(),
            accelerators=tuple(map(str, context.get_accelerator_ids().get("GPU", ()))),
        )

    def _transport_of(self, plan: Plan) -> Transport:
        if all(group == GroupShape(self._endpoint.shape.axes) for group in self._endpoint.groups):
            return self._router  # whole values go from one process to another with the same submesh
        routes = Routes(plan, Topology(self._endpoint.groups, self._gathering)).of_group(
            self._endpoint.mpmd_idx
        )
        me, submesh = self._endpoint, self._worker.submesh
        return SliceTransport(self._router, me, self._agreement, routes, submesh)

    def listen(self, transports: Iterable[str], host: str, credentials: Credentials) -> dict[str, Any]:
        return self._router.listen(transports, host, credentials)

    def connect(
        self,
        routes: Mapping[int, str],
        gathering: frozenset[Edge],
        addresses: Sequence[Mapping[str, Any]],
        by_tcp: bool,
    ) -> None:
        """Connects with the other processes, when all listen, by the transports that ``routes`` names.

        The driver has connected already if it asks ``by_tcp``. Call ``serve`` next.
        """
        self._gathering = gathering
        others = self._endpoint.partners | ({DRIVER} if by_tcp else set())
        connections = self._router.connect(routes, addresses, others)
        driver = connections.pop(DRIVER, None)
        self._server = None if driver is None else Server(repr(self), driver)
        self._agreement.connect([connections[partner] for partner in sorted(connections)])

    @ray.method(concurrency_group="control")
    def ship(self, number: int, shipment: Shipment) -> None:
        self._shipments[number] = shipment

    def _load(self, number: int) -> LoadReply:
        shipment = self._shipments[number]
        names = [executable.name for executable in shipment.plan.executables_of(self._endpoint.mpmd_idx)]
        needed = [name for name in names if name not in shipment.compiled]
        here = [leaf.name for leaf in shipment.plan.constants_of(self._endpoint.mpmd_idx)]
        with self._naming_failures(), self._activity.during(Loading("loading the program")):
            functions = {name: exported_function(name, shipment.exported[name]) for name in needed}
            self._router.trim()  # what is sent from now on may be of other sizes
            # The shipment is in Ray's memory, which device_put may alias: copy.
            constants = {name: np.array(shipment.constants[name]) for name in here}
            program = Program(shipment.plan, functions, constants, compiled=shipment.compiled)
            reply = self._worker.load(number, program)
        del self._shipments[number]
        return reply

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            where = f"loading the program failed on {self}"
            message = f"{where}: {type(error).__name__}: {error}"
            raise TaskError(message, self._endpoint.mpmd_idx, "load") from error

    def answer(self, request: Request) -> Any:
        """The answer of this process to a request of the driver; see ``GroupWorker.answer``.

        Raises, besides the errors of a step: ``WorldLostError`` when the processes of the group have lost one
          another, ``PeerLostError`` when this process has lost a process of another group, ``RuntimeError``
          for a step that has come before, ``TaskError`` with the label ``load`` when loading fails.
        """
        match request:
            case StepRequest():
                return self._run_step(request)
            case Fetch():
                value = self._worker.answer(request)
                return [*map(_packed, value)] if isinstance(value, tuple) else _packed(value)
            case Release(released):
                self._drop_shipments(released)
            case Compile(program, executable, exported):
                with self._naming_failures():
                    function = exported_function(executable.name, exported)
                    return self._worker.compile(program, executable, function)
            case Load(program):
                return self._load(program)
        return self._worker.answer(request)

    def _run_step(self, request: StepRequest) -> StepReply:
        if request.run <= self._last_run:
            raise RuntimeError(f"step {request.step} has come before")
        self._last_run = request.run
        self._router.begin_step(request.run, request.groups)
        self._drop_shipments(request.released)
        try:
            return self._worker.answer(request)
        except StepAborted:
            if self._router.lost is not None:
                raise self._router.lost from None
            raise
        except Exception as error:
            self._agreement.leave(request.run, str(error))
            if self._endpoint.shape.num_processes > 1 and world.is_lost(error.__cause__):
                raise world.WorldLostError(str(error)) from error
            raise

    def _put(self, value: PackedValue, sharding: jax.sharding.Sharding) -> jax.Array:
        """The value on the devices: a copy where Ray has brought it, because Ray reuses its memory."""
        slices = {}
        for index, packed in value.slices:
            array = unpack(packed) if self._server is not None else unpack(packed).copy()
            if index is None:
                return put(array, sharding)
            slices[box_of(index, value.shape)] = array
        return assemble(Aval(value.shape, str(array.dtype), array.itemsize), sharding, slices)

    def _drop_shipments(self, released: Released) -> None:
        """Drops programs that were shipped and not loaded."""
        for number in released.programs:
            self._shipments.pop(number, None)

    @ray.method(concurrency_group="control")
    def deliver(self, message: MessageId, packed: Sequence[PackedArray]) -> None:
        self._router.deliver(message, packed)

    @ray.method(concurrency_group="control")
    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of a step, now and later."""
        self._router.abort(step, reason)

    @ray.method(concurrency_group="control")
    def health(self) -> Doing:
        return self._activity.read()

    @ray.method(concurrency_group="watch")
    def serve(self) -> None:
        """Answers the driver's requests over its connection; where the driver asks by Ray, only waits.

        The call fails when the actor dies, which is how the driver notices.
        """
        if self._server is None:
            self._forever.wait()
        else:
            self._server.serve(self.answer)


def _submesh_of(process: Endpoint) -> jax.sharding.Mesh:
    """The group's submesh; each of several processes gives it as many of its devices.

    Raises: ``RuntimeError`` when a process has too few, or none of its platform.
    """
    shape = process.shape
    needed = shape.devices_per_process
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # what JAX raises depends on which plugins it found
        platform = os.environ["JAX_PLATFORMS"]
        raise RuntimeError(f"JAX finds no devices of the platform {platform!r} here: {error!r}") from error
    if len(devices) < needed:
        raise RuntimeError(
            f"group {process.mpmd_idx} needs {needed} devices in each process for its submesh "
            f"{dict(shape.axes)}, but this one has {len(devices)}: {', '.join(map(str, devices))}"
        )
    taken = [d for process in range(jax.process_count()) for d in jax.local_devices(process)[:needed]]
    return jax.sharding.Mesh(np.array(taken).reshape(tuple(shape.axes.values())), tuple(shape.axes))


def _packed(array: jax.Array) -> PackedValue:
    """If several devices of the group hold the same slice, only one copy is returned."""
    if array.is_fully_addressable:
        return PackedValue(array.shape, ((None, pack(np.asarray(array))),))
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return PackedValue(array.shape, tuple((s.index, pack(np.asarray(s.data))) for s in shards))


def _log_file() -> str:
    """The file that Ray has made stderr; empty where the system does not tell."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""
