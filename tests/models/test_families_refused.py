"""The config alone rejects an unsupported model, with the reason; rotary tables and nested configs are right."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.errors import CheckpointError
from eyas.models.heads.eagle import load_fuser, load_head
from eyas.models.loading import load_target
from eyas.models.supported import measure_kv_shapes
from tests.models.test_target import expected, make_kv_cache, run, segment
from tests.support.families import FAMILIES, LONG, config_of, write_model
from tests.support.tiny import write_head

LINEAR = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "recurrent layers linear_attention"),
    "rwkv": ({"attention_hidden_size": 32}, "recurrent layers: their state"),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1}, "recurrent layers linear_attention"),
    "qwen3_next": (LINEAR, "recurrent layers linear_attention"),
    "recurrent_gemma": ({}, "recurrent layers"),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "recurrent layers conv"),
    "minimax": (LINEAR, "recurrent layers linear_attention"),
    "llama4_text": ({"layer_types": ["chunked_attention"] * 3}, "does not support: chunked_attention"),
    "gpt_oss": ({"head_dim": 8, "num_local_experts": 4}, "attention sinks"),
    "deepseek_v3": (
        {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 3},
        "latent attention: keys of width 16, values of width 12",
    ),
    "bart": ({}, "encoder-decoder"),
    "bert": ({"is_decoder": False}, "attends in both directions"),
    "bloom": ({}, "does not go through transformers' attention interface"),
    "vit": ({}, "has no causal language model"),
}  # fmt: skip


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_unsupported_model_is_rejected_without_weights(model_type: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[model_type]
    config_of(model_type, **settings).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        load_target(str(tmp_path))


def test_cross_attention_layers_are_refused_by_number(tmp_path: Path) -> None:
    from transformers import MllamaConfig

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 48,
            "num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 2}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"layers \[1\] do not attend to the text"):
        measure_kv_shapes(MllamaConfig(text_config=text))


def test_shapes_are_measured_layer_by_layer() -> None:
    kind, settings = FAMILIES["gemma-4"]
    config = config_of(kind, **{**settings, "attention_k_eq_v": True})
    assert measure_kv_shapes(config) == [(2, 8), (1, 16), (1, 16)]
    assert measure_kv_shapes(config_of("mistral", head_dim=None)) == [(2, 8)] * 3


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


def test_a_text_model_inside_a_multimodal_one_is_served(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    kind, settings = FAMILIES["gemma-3"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=config_of(kind, **settings).to_dict(), vision_config=vision, mm_tokens_per_image=4)
    folder = write_model(tmp_path, config)
    target = load_target(folder)
    assert (target.vocab_size, target.max_model_len, target.kv_shapes) == (48, 256, [(2, 16)] * 3)
    tokens, slots = list(range(3, 40)), torch.arange(400).numpy()
    got = run(target, [segment(tokens, 0, slots[:37], slots[:0])], make_kv_cache(target))[0]
    torch.testing.assert_close(got, expected(folder, tokens), atol=1e-4, rtol=1e-4)
    head = load_head(str(write_head(tmp_path / "head")), folder)
    assert head.max_model_len == 256
    assert torch.equal(head.embedding, target.model.get_input_embeddings().weight)
    assert load_fuser(str(tmp_path / "head"), folder).aux_hidden_state_layers == (1, 2, 3)


def test_every_eos_id_of_the_generation_config_counts(tmp_path: Path) -> None:
    assert load_target(write_model(tmp_path, config_of("llama"))).eos_ids == {1, 7}
