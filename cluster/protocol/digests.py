"""Digests of bytes that travel between processes or are kept for later, to notice when they change.

They are XXH3's of 64 bits, which miss one change in 2^64 and are faster than to copy the memory. They are for
faults of hardware and of systems. Who changes things on purpose is kept out by TLS.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

Digest = xxhash.xxh3_64


class CorruptedError(OSError):
    """Received bytes differ from the bytes that were sent."""


def digest_of(content: bytes | bytearray | memoryview, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(content, seed)


def digest_of_all(pieces: Sequence[memoryview]) -> int:
    if len(pieces) == 1:
        return digest_of(pieces[0])
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()
