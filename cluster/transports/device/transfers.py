"""The payload of a connection whose arrays are not sent, but offered for the peer's devices to pull."""

from __future__ import annotations

import itertools
import math
import pickle
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpmd.ir.plan import Spec
from mpmd.runtime.transport import Array
from mpmd.sharding import spec_of, to_sharding

_PACKET_BYTES = 16 * 1024
"""Messages up to this size whose arrays are in host memory are sent as they are, and not pulled."""


class Transfers:
    """The transfers between this group's devices and the devices of one peer, in both directions."""

    def __init__(self, submesh: jax.sharding.Mesh, server: Any, pulling: Any):
        self._submesh = submesh
        self._server = server
        self._pulling = pulling
        self._numbers = itertools.count(secrets.randbits(62))
        self._in_host_memory = submesh.devices.flat[0].platform == "cpu"

    def offer(self, arrays: Sequence[Array]) -> bytes | None:
        """Offers arrays. Returns what the peer needs to pull them; ``None``: the message is to be sent."""
        if self._in_host_memory and sum(array.nbytes for array in arrays) <= _PACKET_BYTES:
            return None
        specs = [self._spec_of(array) for array in arrays]
        # Copies, because the caller may donate what it has sent.
        offered = jax.device_put(list(arrays), list(map(self._sharding, specs)), may_alias=False)
        number = next(self._numbers)
        if pulled := [array for array in offered if array.nbytes]:  # the server never reports empty arrays
            self._server.await_pull(number, pulled)
        offers = [(a.shape, a.dtype, spec) for a, spec in zip(offered, specs, strict=True)]
        return pickle.dumps((number, offers))

    def pull(self, content: bytearray) -> list[jax.Array]:
        """Begins to pull what the peer has offered.

        Raises: ``JaxRuntimeError`` when there is not enough memory.
        """
        number, offers = pickle.loads(content)
        avals = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(spec)) for shape, dtype, spec in offers
        ]
        pulled = iter(self._pulling.pull(number, [a for a in avals if math.prod(a.shape)]))
        return [
            next(pulled) if math.prod(a.shape) else jax.device_put(np.zeros(a.shape, a.dtype), a.sharding)
            for a in avals
        ]

    def _spec_of(self, array: Array) -> Spec | None:
        """The spec over either group's submesh; ``None`` for an array on one device."""
        if isinstance(array, np.ndarray) or isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
            return None  # a part of a value, whose reader may have more devices
        return spec_of(array.sharding, self._submesh, array.ndim)

    def _sharding(self, spec: Spec | None) -> jax.sharding.Sharding:
        if spec is None:
            return jax.sharding.SingleDeviceSharding(self._submesh.local_devices[0])
        return to_sharding(spec, self._submesh)
