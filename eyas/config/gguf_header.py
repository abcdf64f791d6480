"""Reads the header of a GGUF file: its metadata and what it says of its tensors. Needs no torch.

The reader of the package `gguf` makes several arrays of each token: a minute for a vocabulary of 262,144.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Kinds of values: numbers of a fixed size as `struct` names them, a text, and an array.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
# Most dimensions of a tensor.
MAX_DIMS = 4


@dataclass(frozen=True)
class StoredBlock:
    """A tensor as its file holds it.

    Attributes:
        shape: in torch's order.
        kind: number of its kind of numbers, see `gguf.GGMLQuantizationType`.
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def count(self) -> int:
        """The number of its elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a GGUF file, by the names that llama.cpp gives, and its tensors."""

    metadata: dict[str, Any]
    tensors: tuple[StoredBlock, ...]

    @property
    def architecture(self) -> str:
        """The name of the architecture, such as llama; empty without one."""
        return str(self.metadata.get("general.architecture", ""))

    def own(self, key: str) -> Any:
        """Return a value that is named by the architecture, such as `rope.freq_base`; None without one."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_header(file: Path) -> GgufHeader:
    """Return what a GGUF file says before its tensors. Raises CheckpointError for another, a newer or a damaged file."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{file} is not a GGUF file that can be read: {str(error) or type(error).__name__}; fetch it again"
        ) from error


class _Reader:
    """Position in a file that is read from its beginning."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4

    def header(self) -> GgufHeader:
        """Read all of it. Raises ValueError and struct.error."""
        if self._data[:4] != MAGIC:
            raise ValueError(f"it begins with {self._data[:4]!r}, not with {MAGIC!r}")
        version, num_tensors, num_values = self._numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"it has version {version} of the format, and versions 2 and 3 are read")
        metadata = {}
        for _ in range(num_values):
            name = self._text()
            metadata[name] = self._value(*self._numbers("I"))
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment is {alignment!r:.80}, which is not a power of two")
        start = -(-self._at // alignment) * alignment
        moved = [StoredBlock(one.name, one.shape, one.kind, start + one.offset) for one in tensors]
        if behind := next((one for one in moved if one.offset > len(self._data)), None):
            raise ValueError(
                f"{behind.name} begins at {behind.offset}, but the file ends at {len(self._data)}: it is truncated"
            )
        return GgufHeader(metadata, tuple(moved))

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{kinds}", self._data, self._at)
        self._at += struct.calcsize(f"<{kinds}")
        return found

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError("it ends within its header")
        text, self._at = self._data[self._at : end].decode(), end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _FIXED:
            return self._numbers(_FIXED[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"its metadata holds a value of kind {kind}")
        inner, count = self._numbers("IQ")
        if inner in _FIXED:
            return list(self._numbers(f"{count}{_FIXED[inner]}"))
        if inner == _ARRAY:
            raise ValueError("its metadata holds arrays in an array")
        return [self._value(inner) for _ in range(count)]

    def _tensor(self) -> StoredBlock:
        """Read one entry of the table of tensors; its offset counts from the first tensor."""
        name = self._text()
        (num_dims,) = self._numbers("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"its tensor {name:.80} has {num_dims} dimensions, more than {MAX_DIMS}")
        dims = self._numbers(f"{num_dims}Q")
        kind, offset = self._numbers("IQ")
        return StoredBlock(name, tuple(reversed(dims)), kind, offset)
