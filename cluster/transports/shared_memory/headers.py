"""The headers that a sender writes to the pipe of the receiver's inbox, one for each message."""

from __future__ import annotations

import struct
from typing import NamedTuple

from cluster.protocol.digests import CorruptedError, digest_of
from cluster.transports.inbox import HEADER_BYTES

_FIELDS = struct.Struct("<iiqIIQQq")
_DIGEST = struct.Struct("<Q")
assert _FIELDS.size + _DIGEST.size == HEADER_BYTES

SLOT_DISCARDED = -1
"""In place of a tag: the sender does not use the slot any more."""


class SlotHeader(NamedTuple):
    """The slot of a message in shared memory.

    Attributes:
      source: the process that sends.
      tag, step: the tag and the step of the message.
      slot: its number; it was announced before.
      num_types, nbytes: the bytes of the values' types, which are after the values, and of the values.
      digest: the digest of both.
      written: when the slot was filled, in nanoseconds of the sender's ``time.perf_counter_ns``.
    """

    source: int
    tag: int
    step: int
    slot: int
    num_types: int = 0
    nbytes: int = 0
    digest: int = 0
    written: int = 0

    def pack(self) -> bytes:
        fields = _FIELDS.pack(*self)
        return fields + _DIGEST.pack(digest_of(fields))

    @classmethod
    def unpack(cls, packed: bytes) -> SlotHeader:
        fields = packed[: _FIELDS.size]
        if _DIGEST.pack(digest_of(fields)) != packed[_FIELDS.size :]:
            raise CorruptedError("the header of a message was changed on the way")
        return cls(*_FIELDS.unpack(fields))
