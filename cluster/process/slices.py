"""Messages between groups of several processes, or of different shapes: each process sends its own slices."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from cluster.process.agreement import Agreement
from cluster.process.array_slices import assemble, is_on_host, slice_of
from cluster.protocol.endpoint import Endpoint
from mpmd.compat import with_any_sub_byte_layout
from mpmd.errors import StepAborted, TaskError
from mpmd.ir.plan import Aval
from mpmd.ir.reshard import Box
from mpmd.ir.routes import Route, Slice
from mpmd.runtime.transport import Array, MessageId, Transport
from mpmd.sharding import to_sharding


class _Landing(NamedTuple):
    """The arrival of a message at this process.

    Attributes:
      avals: of the message's values.
      slices: what each process of the sender sends.
      shardings: of each value when its slices are there.
      scattered: the positions of the values that the group's tasks read in other shardings.
      gather: makes those, together with the group's other processes.
    """

    avals: tuple[Aval, ...]
    slices: Mapping[int, tuple[Slice, ...]]
    shardings: tuple[jax.sharding.Sharding, ...]
    scattered: tuple[int, ...]
    gather: jax.stages.Compiled | None


class SliceTransport(Transport):
    """Implements ``Transport`` for one program and one process of a group, by messages between processes.

    Values that the routes have the group gather need executables, which are compiled here, in all of its
    processes.

    Args:
      transport: between processes; its messages name processes in place of groups.
      endpoint: this process.
      agreement: the agreement of this process's group.
      routes: how each message of the group travels.
      submesh: the group's devices.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: Endpoint,
        agreement: Agreement,
        routes: Mapping[tuple[int, int, int], Route],
        submesh: jax.sharding.Mesh,
    ):
        self._transport = transport
        self._endpoint = endpoint
        self._agreement = agreement
        here, rank = endpoint.mpmd_idx, endpoint.rank
        self._sent = {key: route.sent_by(rank) for key, route in routes.items() if key[0] == here}
        landing_of = functools.cache(functools.partial(_landing, submesh, rank))
        self._received = {key: landing_of(route) for key, route in routes.items() if key[1] == here}
        self._arrived = 0
        self._device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        for process, slices in self._sent[message[1:]].items():
            dst = self._endpoint.number_of(message.dst, process)
            between = MessageId(message.step, self._endpoint.number, dst, message.tag)
            try:
                self._transport.send(between, [slice_of(arrays[piece.value], piece.box) for piece in slices])
            except StepAborted:
                # Nobody waits for the message any more. The group leaves the step where it next agrees.
                return

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        landing = self._received[message[1:]]
        slices: list[dict[Box, Array]] = [{} for _ in landing.avals]
        # Where no slice is for this process, the message is here at once.
        reason, self._arrived = None, 0 if landing.slices else time.perf_counter_ns()
        try:
            for process, expected in landing.slices.items():
                src = self._endpoint.number_of(message.src, process)
                between = MessageId(message.step, src, self._endpoint.number, message.tag)
                arrays = self._transport.recv(between, [self._device] * len(expected))
                self._arrived = max(self._arrived, self._transport.arrived)
                for piece, array in zip(expected, arrays, strict=True):
                    slices[piece.value][piece.box] = array
        except StepAborted as aborted:
            reason = str(aborted)
        self._agreement.agree(message.step, reason)
        landed = [assemble(*value) for value in zip(landing.avals, landing.shardings, slices, strict=True)]
        if landing.gather is not None:
            gathered = _run(landing.gather, [landed[i] for i in landing.scattered], message)
            for i, array in zip(landing.scattered, gathered, strict=True):
                landed[i] = array
        return landed

    @property
    def arrived(self) -> int:
        return self._arrived


def _landing(submesh: jax.sharding.Mesh, process: int, route: Route) -> _Landing:
    scattered = tuple(i for i, passage in enumerate(route.passages) if passage.landing != passage.spec)
    gathered = [route.passages[i] for i in scattered]
    gather = None
    if gathered:
        identity = jax.jit(
            lambda *arrays: arrays,
            in_shardings=tuple(to_sharding(passage.landing, submesh) for passage in gathered),
            out_shardings=tuple(to_sharding(passage.spec, submesh) for passage in gathered),
        )
        avals = (jax.ShapeDtypeStruct(passage.aval.shape, passage.aval.dtype) for passage in gathered)
        gather = with_any_sub_byte_layout(identity.lower(*avals).compile())
    return _Landing(
        avals=tuple(passage.aval for passage in route.passages),
        slices=route.received_by(process),
        shardings=tuple(to_sharding(passage.landing, submesh) for passage in route.passages),
        scattered=scattered,
        gather=gather,
    )


def _run(gather: jax.stages.Compiled, arrays: Sequence[jax.Array], message: MessageId) -> Sequence[jax.Array]:
    try:
        gathered = gather(*arrays)
        if is_on_host(gathered[0]):
            gathered[-1].block_until_ready()  # so that a failure is known to be this one
    except Exception as error:
        what = f"message {message.tag} of group {message.src}"
        raise TaskError(f"gathering {what} failed: {error}", message.dst, what) from error
    return gathered
