"""The tensors of the KV cache: keys, values and fused features, one slot per token; and slot tables on a device.

Keys and values may have 8 bits, divided by a scale of their layer. torch copies such numbers between slots as bytes.
Legend: S slots, R rows, J key-value heads, D head width, H width of fused features, or of the states that they are made of.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Floats, Ints
from eyas.cache.slot_tables import TableId, TableRows
from eyas.errors import ConfigError
from eyas.kernels.arguments import UNSCALED, KVScales
from eyas.kernels.choice import tree_kernels

if TYPE_CHECKING:
    from eyas.cache.state_pools import StatePools

# More is of little use on a CPU, whose memory is shared with other processes.
MAX_BYTES_ON_CPU = 4 * 2**30
MAX_SLOTS_ON_CPU = 2**16
# Types of keys and values by the names of vLLM; "auto" is the model's.
KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Bytes; rows that begin within a line are slower to read.
CACHE_LINE = 64


class KVShape(NamedTuple):
    """Keys and values of a token in a layer. Heads of values may be narrower than those of keys.

    is_latent: values are the first numbers of keys, and nothing is stored twice.
    """

    num_heads: int
    key_width: int
    value_width: int
    is_latent: bool = False

    @property
    def width(self) -> int:
        """Return the larger width of a head."""
        return max(self.key_width, self.value_width)

    @property
    def numbers(self) -> int:
        """Return the numbers of a token."""
        return self.num_heads * (self.key_width + (0 if self.is_latent else self.value_width))


class KVCache:
    """Per layer one key and one value tensor [S, J, D], and one feature tensor [S, H]; H is 0 without a head.

    scratch: the last slot, which no sequence owns; padding rows write to it, and no row reads it.
    state_layers: those whose states are kept instead of features, see TargetModel; usually none.
    recurrent: the states of recurrent layers, if the target has some. A layer without attention has keys of no heads.

    Args:
        shapes: of each layer.
        kv_dtype: of keys and values, if not `dtype`.
        scales: of each layer, if keys and values have 8 bits; 1 by default.
        sources: the layer whose keys and values each layer has, if some share them.
    """

    state_layers: tuple[int, ...] = ()
    recurrent: StatePools | None = None

    def __init__(
        self,
        num_slots: int,
        shapes: Sequence[KVShape],
        feature_width: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        scales: Sequence[KVScales] = (),
        sources: Sequence[int] = (),
    ) -> None:
        self.scratch = num_slots
        kv_dtype = kv_dtype or dtype
        self.keys, self.values = list[Tensor](), list[Tensor]()
        for layer, shape in enumerate(shapes):
            is_own = not sources or sources[layer] == layer
            for pools, width in ((self.keys, shape.key_width), (self.values, shape.value_width)):
                if shape.is_latent and pools is self.values:
                    pools.append(self.keys[layer][..., :width])
                    continue
                size = num_slots + 1, shape.num_heads, width
                pools.append(new_pool(size, kv_dtype, device) if is_own else pools[sources[layer]])
        self.is_narrow = kv_dtype in KV_CACHE_DTYPES.values()
        self.scales = list(scales) if self.is_narrow and scales else [UNSCALED] * len(shapes)
        self.scales = [KVScales(s.key, s.key) if own.is_latent else s for s, own in zip(self.scales, shapes, strict=True)]
        if sources:
            self.scales = [self.scales[source] for source in sources]
        self.features = new_pool((num_slots + 1, feature_width), dtype, device)

    @cached_property
    def arrays(self) -> list[tuple[Floats, Floats]]:
        """Keys and values of each layer as arrays, if they are float32 on the CPU."""
        return [(keys.numpy(), values.numpy()) for keys, values in zip(self.keys, self.values, strict=True)]

    @cached_property
    def addresses(self) -> Ints:
        """Return where keys and values of each layer begin in memory, [layers, 2]."""
        return np.array([(keys.data_ptr(), values.data_ptr()) for keys, values in zip(self.keys, self.values, strict=True)])


def new_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros.

    On the CPU it takes memory when it is first used; `torch.zeros` writes to all of it at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def load_rows(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values of slots [n] as [n, J, D] of `dtype`, not yet multiplied by their scale."""
    if pool.dtype == dtype:
        return pool.index_select(0, slots)
    is_narrow = pool.dtype in KV_CACHE_DTYPES.values()
    found = pool.view(torch.uint8).index_select(0, slots).view(pool.dtype) if is_narrow else pool.index_select(0, slots)
    return found.to(dtype)


def bytes_per_slot(
    shapes: Sequence[KVShape],
    feature_width: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    sources: Sequence[int] = (),
) -> int:
    """Return the bytes of one token in `KVCache`."""
    own = [shape for layer, shape in enumerate(shapes) if not sources or sources[layer] == layer]
    kv_bytes = sum(shape.numbers for shape in own) * (kv_dtype or dtype).itemsize
    return kv_bytes + feature_width * dtype.itemsize


def slots_that_fit(slot_bytes: int, fraction: float, device: torch.device, reserved: int = 0) -> int:
    """Return the number of slots in a fraction of the memory that is free now, without `reserved` bytes of it.

    Raises ConfigError if there is none.
    """
    free = free_memory(device)
    num_slots = num_slots_in(free, slot_bytes, fraction, reserved)
    if device.type != "cuda":
        num_slots = min(num_slots, MAX_BYTES_ON_CPU // slot_bytes, MAX_SLOTS_ON_CPU)
    if num_slots < 1:
        kept = f", {reserved / 2**30:.1f} GiB of them for forward passes and CUDA graphs" if reserved else ""
        lower = ", or lower engine.max_num_seqs, engine.max_verify_tokens or engine.max_prefill_tokens" if reserved else ""
        raise ConfigError(
            f"no room for the KV cache: {free / 2**30:.1f} GiB are free on {device}{kept}, gpu_memory_utilization is "
            f"{fraction}, and a token takes {slot_bytes} bytes. Free some memory or take a smaller model{lower}"
        )
    return num_slots


def num_slots_in(free: int, slot_bytes: int, fraction: float, reserved: int = 0) -> int:
    """Return the slots in a fraction of `free` bytes without `reserved` ones; not below 0."""
    return max(int((free - reserved) * fraction), 0) // slot_bytes


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_ram()


def free_ram() -> int:
    """Free memory in bytes; half of all memory if the system does not report it."""
    reported = "SC_AVPHYS_PAGES" in os.sysconf_names
    pages = os.sysconf("SC_AVPHYS_PAGES") if reported else os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")


class TableWrites(NamedTuple):
    """Entries that a pass adds.

    Attributes:
        prefixes: the word at which each segment's prefix begins [B].
        at, slots: what to write where.
    """

    prefixes: Ints
    at: Ints
    slots: Ints


class SlotMemory:
    """`words`, int32: a row of `row_length` words for each table. A pass sees what was written before it."""

    def __init__(self, num_rows: int, row_length: int, device: torch.device) -> None:
        self.words = torch.zeros(num_rows * row_length, dtype=torch.int32, device=device)
        self._num_rows, self._row_length = num_rows, row_length
        self._rows = TableRows(num_rows)

    def place(self, tables: Sequence[TableId | None], prefixes: Sequence[Ints]) -> TableWrites | None:
        """Find room for the prefixes of a pass; None if there is not enough. The caller must do the writes, or `forget`."""
        if not prefixes or len(prefixes) > self._num_rows or max(map(len, prefixes)) > self._row_length:
            return None
        found = self._rows.place(tables, prefixes)
        new = [prefix[count:] for prefix, count in zip(prefixes, found.kept, strict=True)]
        if len(new) == 1:
            start = found.rows[0] * self._row_length
            first = start + found.kept[0]
            return TableWrites(np.array([start]), np.arange(first, first + len(new[0])), new[0])
        starts: Ints = np.array(found.rows, dtype=np.int64) * self._row_length
        at = tree_kernels().ranges(starts + found.kept, np.array(list(map(len, new)), dtype=np.int64))
        return TableWrites(starts, at, np.concatenate(new))

    def forget(self) -> None:
        """Take all rows to be empty, as writes were lost."""
        self._rows = TableRows(self._num_rows)
