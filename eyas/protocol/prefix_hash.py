"""Hashes of the blocks of a token sequence, by which the router finds the verifier that has a prompt's prefix cached.

A block's hash covers every token up to its end, so that two sequences share as many hashes as they share whole blocks.
Sequences with different salts share none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 64
MAX_BLOCKS = 512

_BLOCK_BYTES = 4 * BLOCK_TOKENS


class BlockHasher:
    """Incremental hasher of the blocks of one sequence. salt: see `eyas.api.request.Request`."""

    def __init__(self, salt: str = "") -> None:
        self._hash = blake2b(digest_size=4, key=blake2b(salt.encode()).digest() if salt else b"")
        self._rest = b""

    def copy(self) -> BlockHasher:
        """Return a hasher in the same state, to go on with other tokens."""
        other = BlockHasher()
        other._hash, other._rest = self._hash.copy(), self._rest
        return other

    def update(self, token_ids: Sequence[int]) -> list[int]:
        """Take the next tokens. Returns hashes, in [0, 2^32), of the blocks that they complete."""
        data = self._rest + struct.pack(f"<{len(token_ids)}i", *token_ids)
        end = len(data) // _BLOCK_BYTES * _BLOCK_BYTES
        hashes = []
        for start in range(0, end, _BLOCK_BYTES):
            self._hash.update(data[start : start + _BLOCK_BYTES])
            hashes.append(int.from_bytes(self._hash.digest(), "little"))
        self._rest = data[end:]
        return hashes


def block_hashes(token_ids: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """Return the hashes of a sequence's whole blocks, MAX_BLOCKS at most. Token ids must fit in 32 bits."""
    return tuple(BlockHasher(salt).update(token_ids[: MAX_BLOCKS * BLOCK_TOKENS]))
