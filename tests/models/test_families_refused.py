"""The config alone rejects an unsupported model, with the reason; rotary tables and nested configs are right."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from eyas.cache.kv_cache import KVShape
from eyas.errors import CheckpointError
from eyas.models.heads.eagle import load_fuser, load_head
from eyas.models.layers.attention import register_attention
from eyas.models.loading import load_target
from eyas.models.supported import inspect_architecture
from tests.models.test_target import expected, make_kv_cache, run, segment
from tests.support.families import config_of, write_model, write_wrapped
from tests.support.family_configs import (
    ENCODER,
    FAMILIES,
    HYBRIDS,
    LONG,
    MORE_FAMILIES,
    NEEDED,
    NO_ATTENTION,
    NOT_JUDGED,
    ONCE,
    REFUSED,
    SAME_AS,
    WRAPPED,
)
from tests.support.tiers import tiered
from tests.support.tiny import write_head

# A family of each reason.
DAILY = {reason: model_type for model_type, (reason, _) in REFUSED.items()}.values()


@pytest.mark.parametrize("model_type", tiered(REFUSED, DAILY))
def test_a_refusal_names_layers_and_what_is_missing(model_type: str) -> None:
    reason, settings = REFUSED[model_type]
    register_attention()
    config = config_of(model_type, **settings) if settings is not None else AutoConfig.for_model(model_type)
    with pytest.raises(CheckpointError, match=re.escape(reason)) as refusal:
        inspect_architecture(config)
    if reason != ENCODER:
        assert f"To serve it, Eyas would need {NEEDED[reason]};" in str(refusal.value)
    if reason not in (ENCODER, ONCE) and model_type not in ("rwkv", "recurrent_gemma", "xlstm"):
        assert re.search(r"layers \[\d", str(refusal.value)), "it says which layers"


@pytest.mark.parametrize(("model_type", "reason"), [("mamba", NO_ATTENTION), ("vit", "has no causal language model")])
def test_an_unsupported_model_is_rejected_without_weights(model_type: str, reason: str, tmp_path: Path) -> None:
    config_of(model_type).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        load_target(str(tmp_path))


def test_a_refused_text_part_is_named_with_its_wrapper(tmp_path: Path) -> None:
    text = config_of("qwen4_exp_text", **REFUSED["qwen4_exp_text"][1])
    AutoConfig.for_model("qwen4_exp", text_config=text.to_dict()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"text part of qwen4_exp: qwen4_exp_text: it has layers of types .* \[2\]"):
        load_target(str(tmp_path))


def test_every_family_of_transformers_is_in_a_table() -> None:
    kinds = {kind for kind, _ in FAMILIES.values()}
    tables = [kinds, MORE_FAMILIES, HYBRIDS, WRAPPED, REFUSED, SAME_AS, NOT_JUDGED]
    named = [kind for table in tables for kind in table]
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(named) == set(), "say of each whether it is served"
    assert len(named) == len(set(named)), "in one table only"
    assert set(SAME_AS.values()) <= kinds | set(MORE_FAMILIES) | set(HYBRIDS) | set(REFUSED)


def test_cross_attention_layers_are_refused_by_number(tmp_path: Path) -> None:
    from transformers import MllamaConfig

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 48,
            "num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 2}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"layers \[1\] do not attend to the text"):
        inspect_architecture(MllamaConfig(text_config=text))


def test_shapes_are_measured_layer_by_layer() -> None:
    kind, settings = FAMILIES["gemma-4"]
    config = config_of(kind, **{**settings, "attention_k_eq_v": True})
    assert inspect_architecture(config).kv_shapes == [KVShape(2, 8, 8), KVShape(1, 16, 16), KVShape(1, 16, 16)]
    assert inspect_architecture(config_of("mistral", head_dim=None)).kv_shapes == [KVShape(2, 8, 8)] * 3


@pytest.mark.parametrize(("context", "length"), [(0, 80), (0, 200), (64, 60)])
def test_longrope_keeps_the_table_of_its_context(context: int, length: int, tmp_path: Path) -> None:
    """A context beyond the original one takes the long table, also for rows before that; a shorter one the short table."""
    settings = {"rope_parameters": {**LONG, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 64}
    folder = write_model(tmp_path, config_of("phi3", **settings, sliding_window=None))
    target = load_target(folder, max_model_len=context)
    tokens = torch.randint(3, 48, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    kv_cache, slots = make_kv_cache(target), torch.arange(400).numpy()
    got = [
        run(target, [segment(tokens[a:b], a, slots[a:b], slots[:a])], kv_cache)[0]
        for a, b in ((0, 20), (20, length - 1), (length - 1, length))
    ]
    torch.testing.assert_close(torch.cat(got), expected(folder, tokens), atol=1e-4, rtol=1e-4)


def test_a_dynamic_table_does_not_move_with_the_longest_row(tmp_path: Path) -> None:
    kind, settings = FAMILIES["rope-dynamic"]
    target = load_target(write_model(tmp_path, config_of(kind, **settings)))
    kv_cache, slots = make_kv_cache(target), torch.arange(400).numpy()
    before = run(target, [segment([5, 6], 0, slots[:2], slots[:0])], kv_cache)[0]
    run(target, [segment([5, 6], 300, slots[10:12], slots[:0])], kv_cache)
    after = run(target, [segment([5, 6], 0, slots[:2], slots[:0])], kv_cache)[0]
    assert torch.equal(before, after)


def test_heads_take_the_embedding_of_a_text_part(tmp_path: Path) -> None:
    folder = write_wrapped("gemma3", tmp_path)
    target = load_target(folder)
    assert (target.vocab_size, target.max_model_len, target.kv_shapes) == (48, 256, [KVShape(2, 16, 16)] * 3)
    head = load_head(str(write_head(tmp_path / "head")), folder)
    assert head.max_model_len == 256
    assert torch.equal(head.embedding, target.model.get_input_embeddings().weight)
    assert load_fuser(str(tmp_path / "head"), folder).aux_hidden_state_layers == (1, 2, 3)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_a_causal_family_in_both_directions_is_refused(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, config_of(kind, is_causal=False))
    with pytest.raises(CheckpointError, match=r"layers \[0, 1, 2\] attend in both directions"):
        load_target(folder)


def test_a_call_that_asks_for_both_directions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda *args, **named: plain(*args, **named, is_causal=False))
    with pytest.raises(CheckpointError, match=r"layers \[0, 1, 2\] attend in both directions"):
        inspect_architecture(config_of("llama"))


def test_a_chunked_mask_is_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its size arrives as a window's does."""
    config = config_of("llama", attention_chunk_size=8, sliding_window=8)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", masking_utils.create_sliding_window_causal_mask)
    assert inspect_architecture(config).windows == {0: 8, 1: 8, 2: 8}
    monkeypatch.setattr(modeling_llama, "create_causal_mask", masking_utils.create_chunked_causal_mask)
    with pytest.raises(CheckpointError, match=r"layers \[0, 1, 2\] give attention .* not support: attention_mask"):
        inspect_architecture(config)
