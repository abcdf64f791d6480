"""The target behind our attention equals transformers' own forward; the tree mask equals separate sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.arrays import Ints
from eyas.cache.kv_cache import KVCache
from eyas.cache.states import StateSizes, StateStep
from eyas.errors import CheckpointError
from eyas.models.inputs import Segment, pack
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.tree import DraftTree
from tests.support.reference import load_reference
from tests.support.strategies import trees


def segment(tokens: list[int], start: int, slots: Ints, prefix: Ints, states: StateStep | None = None) -> Segment:
    ids = np.array(tokens, dtype=np.int64)
    positions, wanted = np.arange(start, start + len(ids)), np.arange(len(ids))
    return Segment(ids, positions, slots, prefix, None, wanted, states=states)


def run(target: TargetModel, segments: list[Segment], kv_cache: KVCache) -> list[torch.Tensor]:
    logits = target.forward(pack(segments, target.device), kv_cache).logits
    return list(logits.split([len(s.logits_indices) for s in segments]))


def make_kv_cache(target: TargetModel, num_slots: int = 400) -> KVCache:
    return target.new_kv_cache(num_slots, states=StateSizes(8, 64))


@torch.inference_mode()
def expected(path: str, tokens: list[int]) -> torch.Tensor:
    return load_reference(path)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def target(tiny_target: str) -> TargetModel:
    return load_target(tiny_target)


@settings(max_examples=12)
@given(batch=st.lists(trees(vocab_size=48), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_every_tree_node_equals_its_path_run_as_a_sequence(
    target: TargetModel, tiny_target: str, batch: list[DraftTree], seed: int
) -> None:
    kv_cache, rng = make_kv_cache(target), np.random.default_rng(seed)
    slots, segments, prefixes = rng.permutation(400), [], []
    for tree in batch:
        prefix = rng.integers(0, 48, int(rng.integers(1, 20))).tolist()
        held, slots = slots[: len(prefix)], slots[len(prefix) :]
        run(target, [segment(prefix, 0, held, held[:0])], kv_cache)
        positions = len(prefix) + np.array(tree.depths)
        rows = Segment(
            np.array(tree.tokens), positions, slots[: len(tree)], held, tree.ancestor_mask(), np.arange(len(tree))
        )
        slots = slots[len(tree) :]
        segments.append(rows)
        prefixes.append(prefix)
    for tree, prefix, logits in zip(batch, prefixes, run(target, segments, kv_cache), strict=True):
        for node in range(len(tree)):
            tokens = prefix + [tree.tokens[above] for above in tree.path(node)]
            torch.testing.assert_close(logits[node], expected(tiny_target, tokens)[-1], atol=1e-4, rtol=1e-4)


def test_aux_hidden_states_are_the_inputs_of_their_layers(tiny_target: str) -> None:
    tapping = load_target(tiny_target, aux_hidden_state_layers=(1, 3, 4))
    tokens = [5, 9, 11]
    out = tapping.forward(pack([segment(tokens, 0, np.arange(3), np.arange(0))], tapping.device), make_kv_cache(tapping))
    layers = load_reference(tiny_target).model.layers
    seen: dict[int, torch.Tensor] = {}
    hooks = [layers[i].register_forward_pre_hook(lambda m, a, i=i: seen.update({i: a[0]})) for i in (1, 3)]
    hooks.append(load_reference(tiny_target).model.norm.register_forward_pre_hook(lambda m, a: seen.update({4: a[0]})))
    expected(tiny_target, tokens)
    for hook in hooks:
        hook.remove()
    assert out.aux_hidden_states is not None
    torch.testing.assert_close(out.aux_hidden_states, torch.cat([seen[i][0] for i in (1, 3, 4)], -1), atol=1e-5, rtol=1e-5)


def test_an_aux_layer_beyond_the_last_layer_is_rejected(tiny_target: str) -> None:
    with pytest.raises(CheckpointError, match="hidden state of layer 7, but the target has 4 layers"):
        load_target(tiny_target, aux_hidden_state_layers=(7,))


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint folder at '\./nowhere'"):
        load_target("./nowhere")


def test_a_target_loads_while_the_log_disk_is_full(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        assert load_target(tiny_target).vocab_size == 48
