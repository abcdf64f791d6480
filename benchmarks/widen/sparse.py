"""Writes large checkpoints of mostly zeros: safetensors files with holes, whose zeros take no disk.

The format is a length, a JSON header and the tensors one after the other (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.errors import ConfigError

# Most bytes of a file, unless one tensor has more.
SHARD_BYTES = 5 << 30
PAGE_BYTES = 4096
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Patch:
    """The same value in one column of some rows. rows: int64 [n]."""

    rows: Tensor
    column: int
    value: float


@dataclass(frozen=True)
class SparseTensor:
    """A tensor of zeros but for what is given. Leading dimensions of `shape` count as rows.

    Attributes:
        rows: row of each given one, int64 [n].
        values: the first columns of these rows, [n, up to the width].
    """

    name: str
    shape: tuple[int, ...]
    rows: Tensor
    values: Tensor
    patches: Sequence[Patch] = field(default=())

    @classmethod
    def dense(cls, name: str, tensor: Tensor) -> SparseTensor:
        """Return a vector that is given as a whole."""
        return cls(name, tuple(tensor.shape), torch.zeros(1, dtype=torch.int64), tensor[None])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in its file, zeros included."""
        return prod(self.shape) * self.values.element_size()

    @property
    def disk_bytes(self) -> int:
        """About the bytes that its values take on a disk."""
        pages = len(self.rows) * -(-self.values[:1].nbytes // PAGE_BYTES) + sum(len(patch.rows) for patch in self.patches)
        return min(self.nbytes, pages * PAGE_BYTES)


def write_sparse(folder: Path, tensors: Sequence[SparseTensor], advance: Callable[[int], object] = lambda _: None) -> None:
    """Write model.safetensors, or several files and their index if there are more than SHARD_BYTES.

    Memory holds the values of one row at a time. advance: called with the bytes of each tensor that is written.
    Raises ConfigError if the disk is full.
    """
    shards = _shards(tensors)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for file, shard in zip(names, shards, strict=True):
            _write_file(folder / file, shard, advance)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error}; free some space, or choose another folder with --out") from error
    if len(shards) > 1:
        where = {each.name: file for file, shard in zip(names, shards, strict=True) for each in shard}
        index = {"metadata": {"total_size": sum(each.nbytes for each in tensors)}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _shards(tensors: Sequence[SparseTensor]) -> list[list[SparseTensor]]:
    shards: list[list[SparseTensor]] = [[]]
    for each in tensors:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + each.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(each)
    return shards


def _write_file(path: Path, tensors: Sequence[SparseTensor], advance: Callable[[int], object]) -> None:
    header, end = _header(tensors)
    with path.open("wb", buffering=0) as file:
        file.write(header)
        file.truncate(len(header) + end)
        start = len(header)
        for each in tensors:
            _write_tensor(file.fileno(), start, each)
            start += each.nbytes
            advance(each.nbytes)


def _header(tensors: Sequence[SparseTensor]) -> tuple[bytes, int]:
    """Return the header, padded to whole pages so that rows lie on few of them, and the bytes behind it."""
    entries: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        offsets = [end, end + each.nbytes]
        entries[each.name] = {
            "dtype": DTYPE_NAMES[each.values.dtype],
            "shape": list(each.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text, end


def _write_tensor(file: int, start: int, tensor: SparseTensor) -> None:
    row_bytes = (tensor.shape[-1] if tensor.shape else 1) * tensor.values.element_size()
    for row, values in zip(tensor.rows.tolist(), tensor.values.contiguous(), strict=True):
        _write_all(file, start + row * row_bytes, values.view(torch.uint8).numpy().tobytes())
    for patch in tensor.patches:
        value = torch.tensor([patch.value], dtype=tensor.values.dtype).view(torch.uint8).numpy().tobytes()
        for row in patch.rows.tolist():
            _write_all(file, start + row * row_bytes + patch.column * len(value), value)


def _write_all(file: int, offset: int, data: bytes) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
