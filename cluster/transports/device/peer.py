"""The connection to a process, with which messages may also be exchanged by transfers between devices."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from cluster.tcp.connection import Connection
from cluster.transports.inbox import ProcessInbox
from cluster.transports.network.frames import FrameKind, Header
from cluster.transports.network.peer import Peer
from mpmd.ir.plan import Spec
from mpmd.runtime.transport import Array, MessageId
from mpmd.sharding import spec_of, to_sharding

_PACKET_BYTES = 16 * 1024
"""Messages up to this size whose arrays are in host memory are sent as they are, and not pulled."""

_DETECTION_SECONDS = 1.0
"""Within this time of a failed pull it is known whether the peer's connection has ended."""


class OfferedArray(NamedTuple):
    """An array at the sender's transfer server.

    ``spec`` holds over either group's submesh; ``None``: the array is on one device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Spec | None


def offered_sharding(spec: Spec | None, submesh: jax.sharding.Mesh) -> jax.sharding.Sharding:
    """The sharding of an offered array at either end."""
    if spec is None:
        return jax.sharding.SingleDeviceSharding(submesh.local_devices[0])
    return to_sharding(spec, submesh)


class DevicePeer(Peer):
    """A ``Peer`` to which arrays can also be offered, for its devices to pull.

    Args:
      inbox, here, process, connection: as for ``Peer``.
      submesh: this group's devices.
      offering: this process's transfer server.
      pulling: the connection to the peer's transfer server.
      numbers: numbers of offers, which no other offer of this process has.
    """

    def __init__(
        self,
        inbox: ProcessInbox,
        here: int,
        process: int,
        connection: Connection,
        submesh: jax.sharding.Mesh,
        offering: Any,
        pulling: Any,
        numbers: Iterator[int],
    ):
        super().__init__(inbox, here, process, connection)
        self._submesh = submesh
        self._offering = offering
        self._pulling = pulling
        self._numbers = numbers
        self._in_host_memory = submesh.devices.flat[0].platform == "cpu"

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        if self._in_host_memory and sum(array.nbytes for array in arrays) <= _PACKET_BYTES:
            super().send(message, arrays)
            return
        self._wait_until_ready(message.step)
        specs = [self._spec_of(array) for array in arrays]
        # Copies, because the caller may donate what it has sent.
        shardings = [offered_sharding(spec, self._submesh) for spec in specs]
        offered = jax.device_put(list(arrays), shardings, may_alias=False)
        number = next(self._numbers)
        if pulled := [array for array in offered if array.nbytes]:  # the server never reports empty arrays
            self._offering.await_pull(number, pulled)
        offers = [OfferedArray(a.shape, a.dtype, spec) for a, spec in zip(offered, specs, strict=True)]
        content = pickle.dumps((number, offers))
        self._writer.put([Header(FrameKind.OFFER, len(content), message.step, message.tag).pack(), content])
        self._window.count_sent()

    def _spec_of(self, array: Array) -> Spec | None:
        if isinstance(array, np.ndarray) or isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
            return None  # a part of a value, whose reader may have more devices
        return spec_of(array.sharding, self._submesh, array.ndim)

    def _receive(self, header: Header) -> None:
        if header.kind != FrameKind.OFFER:
            super()._receive(header)
            return
        number, offers = pickle.loads(self._read_bytes(header.number))
        message = MessageId(header.step, self._process, self._here, header.tag)
        self._confirm(self._receipts.count_arrived(header.step))
        try:
            self._inbox.add(message, _TransferArrival(self, message, self._pull(number, offers)))
            self._inbox.wake()
        except jax.errors.JaxRuntimeError as error:  # there is not enough memory
            self.count_taken()
            receiver, sender = self._inbox.name_of(self._here), self._inbox.name_of(self._process)
            self._inbox.abort(header.step, f"{receiver} could not receive from {sender}: {error}")

    def _pull(self, number: int, offers: Sequence[OfferedArray]) -> list[jax.Array]:
        avals = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=offered_sharding(spec, self._submesh))
            for shape, dtype, spec in offers
        ]
        pulled = iter(self._pulling.pull(number, [a for a in avals if math.prod(a.shape)]))
        return [
            next(pulled) if math.prod(a.shape) else jax.device_put(np.zeros(a.shape, a.dtype), a.sharding)
            for a in avals
        ]

    def lose(self, message: MessageId, error: Exception) -> NoReturn:
        """Raises the error of a message that could not be pulled; ``StepAborted`` when the peer is gone."""
        if self._disconnected.wait(_DETECTION_SECONDS):
            self._inbox.wait(message.step, lambda: False)
        sender = self._inbox.name_of(self._process)
        raise RuntimeError(f"message {message.tag} of {sender} was lost on the way: {error}") from error


class _TransferArrival(NamedTuple):
    """A message whose arrays are being pulled."""

    peer: DevicePeer
    message: MessageId
    arrays: Sequence[jax.Array]

    def open(self, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[jax.Array]:
        try:
            jax.block_until_ready(self.arrays)
        except jax.errors.JaxRuntimeError as error:
            self.peer.lose(self.message, error)
        finally:
            self.peer.count_taken()
        return [
            array if array.sharding == sharding else jax.device_put(array, sharding)
            for array, sharding in zip(self.arrays, shardings, strict=True)
        ]

    def drop(self) -> None:
        self.peer.count_taken()
