"""What a pass uploads and what the host does for it depend on new slots, whatever the length of the context."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.cache.kv_cache import SlotMemory
from eyas.device.transfer import upload
from eyas.models.backends import attention_metadata as metadata
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.backends.cuda import KernelBackend
from tests.support.devices.growing_trees import counted, grown_steps

CPU = torch.device("cpu")


def packing(num_rows: int, row_length: int) -> KernelBackend:
    target: Any = SimpleNamespace(device=CPU, state_shapes={})
    return KernelBackend(target, Tiling(4, 8, 132), 0, SlotMemory(num_rows, row_length, CPU))


@pytest.mark.parametrize(("sequences", "most_bytes", "most_calls"), [(64, 27_500, 730), (1, 450, 210)])
def test_a_step_uploads_as_much_at_32k_of_context_as_at_1k(
    sequences: int, most_bytes: int, most_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of 16 nodes. Slots that the device has may be anything on the host: they are not read again."""
    sizes = list[int]()

    def count(values: Any, device: torch.device) -> Tensor:
        sizes.append(values.nbytes)
        return upload(values, device)

    monkeypatch.setattr(metadata, "upload", count)
    found = []
    for context in (1 << 10, 1 << 15):
        backend, calls = packing(64, 1 << 16), list[int]()
        sizes.clear()
        for segments in grown_steps(context, poison=True, sequences=sequences):
            calls.append(counted(partial(backend.pack, segments))[1])
        found.append((sizes[1:], calls[1:]))
        assert len(sizes) == 4, "one copy for each pass"
    assert found[0][0] == found[1][0]
    assert max(found[0][0]) <= most_bytes
    assert max(found[0][1] + found[1][1]) <= most_calls


def test_the_device_has_the_tables_of_all_steps() -> None:
    memory = SlotMemory(64, 1200, CPU)
    target: Any = SimpleNamespace(device=CPU, state_shapes={})
    backend = KernelBackend(target, Tiling(4, 8, 132), 0, memory)
    for segments in grown_steps(1000):
        packed = backend.pack(segments)
        assert packed.metadata is not None
        assert packed.metadata.words is memory.words
        for tile, prefix in zip(packed.metadata.tiles.tolist(), segments.prefixes, strict=True):
            assert np.array_equal(memory.words[tile[5] : tile[5] + tile[4]].numpy(), prefix)
