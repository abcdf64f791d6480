"""Memory of passes and graphs by arithmetic, against what a pass of 8B shapes allocates on the `meta` device."""

import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from eyas.cache.kv_cache import num_slots_in
from eyas.kernels.arguments import UNSCALED
from eyas.models.backends.attention_metadata import FIXED_PART, Tiling, bucket_shape, max_words, view
from eyas.models.backends.cuda import KernelBackend
from eyas.models.backends.cuda_graphs import row_buckets
from eyas.models.backends.pass_memory import PassSizes, graph_bytes, launched_bytes, num_partials, output_bytes
from eyas.models.inputs import LongPrompt, MetadataShape, Segment
from eyas.models.target import TargetModel

pytest.importorskip("triton", reason="triton is not installed")

from tests.models.backends.test_launches import GEMMA_4_EXPERTS, SIZES, WIDE, weightless
from tests.support.devices.launches import META, recorded, storage_of
from tests.support.weightless import llama

LLAMA_8B = PassSizes(128256, 4096, 14336, 32, 8, 128, 2, num_aux=3, keeps_logits=True)
H100 = Tiling(4, 8, 132)
GIB = 2**30


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensors alive at once among those that operations inside it make."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._owners: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._own(tensor, given)
        return out

    def _own(self, tensor: Tensor, given: set[int]) -> None:
        storage, size = storage_of(tensor), tensor.untyped_storage().nbytes()
        if storage in given and not self._owners[storage]:
            return  # memory from outside
        if not self._owners[storage]:
            self._now += size
            self.peak = max(self.peak, self._now)
        self._owners[storage] += 1
        weakref.finalize(tensor, self._leave, storage, size)

    def _leave(self, storage: int, size: int) -> None:
        self._owners[storage] -= 1
        if not self._owners[storage]:
            self._now -= size


def peak_of(rows: int, num_logits: int, tiling: Tiling = H100, part_rows: int = 0, num_drawn: int = 0) -> int:
    """Bytes of a pass of 8B shapes with two layers. num_drawn: logits that are copied as `drawn_rows` does."""
    shape = replace(bucket_shape(rows, 32, tiling), logits=num_logits)
    return peak_of_pass(llama(2), tiling, replace(shape, part_rows=part_rows or shape.part_rows), num_drawn)


def peak_of_pass(target: TargetModel, tiling: Tiling, shape: MetadataShape, num_drawn: int = 0) -> int:
    shapes = target.kv_shapes
    keys, values = ([torch.empty(1000, *s[:2], dtype=torch.bfloat16, device=META) for s in shapes] for _ in "kv")
    kv: Any = SimpleNamespace(scales=[UNSCALED] * len(shapes), keys=keys, values=values)
    words = torch.empty(max_words(shape), dtype=torch.int32, device=META)
    with recorded(lambda launch: None), torch.inference_mode(), PeakMemory() as found:
        out = KernelBackend(target, tiling, 0).forward(view(words, shape, shape.logits), kv)
        copied = out.logits[torch.arange(num_drawn, device=META)]
        assert len(copied) == num_drawn
    return found.peak


@pytest.mark.parametrize("rows", [16, 256, 1024])
@pytest.mark.parametrize("has_logits", [True, False])
def test_arithmetic_covers_what_a_pass_allocates(rows: int, has_logits: bool) -> None:
    """At most a third too much. Layers and logits do not live at once: the output head needs hidden states alone."""
    shape, num_logits = bucket_shape(rows, 32, H100), rows if has_logits else 1
    layers, found = LLAMA_8B.layers(rows, num_partials(shape)), peak_of(rows, num_logits)
    expected = max(layers, LLAMA_8B.states(rows) + LLAMA_8B.logits(num_logits))
    assert found <= expected <= 4 / 3 * found, (found, expected)


@pytest.mark.parametrize("longest", [8192, 131072])
def test_arithmetic_covers_parts_at_fixed_positions(longest: int) -> None:
    """Every row of the step at the end of a longest context. Without them 512 rows at 131,072 lacked 1 GB."""
    tiling, rows = replace(H100, longest=longest, fixed_part=FIXED_PART), 512
    found = peak_of(rows, 1, tiling, rows * longest // FIXED_PART)
    expected = launched_bytes(LLAMA_8B, rows, 1, rows - 1, tiling) - LLAMA_8B.logits(rows - 1)
    assert found <= expected <= 4 / 3 * found, (found, expected)
    normal = launched_bytes(LLAMA_8B, rows, 1, rows - 1, H100) - LLAMA_8B.logits(rows - 1)
    assert longest < 131072 or found - normal > 0.9e9


@pytest.mark.parametrize("rows", [64, 1024])
def test_arithmetic_covers_graphs_of_deterministic_mode(rows: int) -> None:
    tiling = replace(H100, longest=8192, fixed_part=FIXED_PART)
    shape = bucket_shape(rows, 32, tiling)
    layers, found = LLAMA_8B.layers(rows, num_partials(shape)), peak_of(rows, rows, tiling)
    expected = max(layers, LLAMA_8B.states(rows) + LLAMA_8B.logits(rows))
    assert shape.part_rows == num_partials(shape) > rows
    assert found <= expected <= 4 / 3 * found, (found, expected)


def test_arithmetic_covers_the_logits_of_prompts() -> None:
    """A step that verifies 1,056 nodes and computes the logits of 512 prompt rows copies those of the nodes."""
    drawn, prompt = 1056, 512
    found = peak_of(drawn + prompt, drawn + prompt, num_drawn=drawn)
    assert found <= launched_bytes(LLAMA_8B, drawn + prompt, drawn, prompt, H100) <= 4 / 3 * found
    assert found > launched_bytes(LLAMA_8B, drawn + prompt, drawn, 0, H100)


@pytest.mark.parametrize(("family", "settings"), [
    ("qwen3_moe", {
        **SIZES, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    }),
    ("gemma4_text", {**WIDE, **GEMMA_4_EXPERTS, "layer_types": ["sliding_attention", "full_attention"]}),
])  # fmt: skip
def test_arithmetic_covers_experts_of_the_largest_pass(family: str, settings: dict[str, Any]) -> None:
    """Each row has the outputs of eight experts side by side. Gemma 4 lacked 156 MB."""
    target = weightless(AutoConfig.for_model(family, **settings, num_hidden_layers=2, pad_token_id=0))
    target.set_aux_hidden_state_layers(())
    rows, tiling = 2432, Tiling(target.heads_per_kv, target.kv_shapes[0].num_heads, 132)
    shape = tiling.shape(rows, 1, -(-rows // tiling.most_rows), tiling.most_rows)
    expected, found = launched_bytes(PassSizes.of(target), rows, 1, 0, tiling), peak_of_pass(target, tiling, shape)
    assert found <= expected <= 4 / 3 * found, (found, expected)


@pytest.mark.parametrize("num_keys", [4097, 131072])
def test_arithmetic_covers_keys_that_are_copied_for_a_library(num_keys: int) -> None:
    """One layer after the other, and one prompt after the other."""
    rows = 512
    tiling = replace(H100, library_rows=256)
    none = np.zeros(0, np.int64)
    prompt = LongPrompt(Segment(*[np.zeros(rows, np.int64)] * 3, np.arange(num_keys - rows), None, none), 0, META)
    copied = prompt.keys.numel() * 2 * 8 * 128 * 2
    assert LLAMA_8B.copied_keys(num_keys) == copied
    with_copies, without = (launched_bytes(LLAMA_8B, rows, 1, rows, tiling, longest) for longest in (num_keys, 0))
    assert copied / 2 < with_copies - without <= copied


def test_the_sizes_of_a_loaded_target_are_found() -> None:
    target = llama(2)
    assert PassSizes.of(target) == LLAMA_8B


def test_graphs_of_8b_shapes_keep_one_buffer_of_logits() -> None:
    """Each graph with its own took 1.83 GB."""
    buckets = row_buckets(1024)
    assert sum(map(LLAMA_8B.logits, buckets)) > 1.8e9
    states = 1024 * 3 * 4096 * 2
    assert output_bytes(LLAMA_8B, 1024) == 1024 * 128256 * 4 + states == 550_502_400
    assert graph_bytes(LLAMA_8B, 5000, 32, H100) == graph_bytes(LLAMA_8B, 1024, 32, H100) < 0.75e9
    assert graph_bytes(LLAMA_8B, 64, 4, H100) < 0.06e9
    scaled = replace(LLAMA_8B, keeps_logits=False)  # the smaller graphs compute logits elsewhere, and copy them
    assert graph_bytes(scaled, 1024, 32, H100) - graph_bytes(LLAMA_8B, 1024, 32, H100) == 768 * 128256 * 4


def test_the_kv_cache_takes_its_share_of_what_graphs_leave() -> None:
    """80 GB with 15 GiB of weights: 63.5 GiB are free, and a slot takes 136 KiB."""
    reserved = graph_bytes(LLAMA_8B, 1024, 32, H100) + launched_bytes(LLAMA_8B, 2432, 1056, 512, H100)
    free, slot = int(63.5 * GIB), 136 * 1024
    num_slots = num_slots_in(free, slot, 0.95, reserved)
    assert num_slots * slot + reserved <= free
    assert num_slots_in(free, slot, 1.0, reserved) * slot + reserved <= free
    assert num_slots == int((free - reserved) * 0.95) // slot
    assert num_slots_in(GIB, slot, 1.0, reserved) == 0
