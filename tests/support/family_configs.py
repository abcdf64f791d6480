"""Families of causal LMs in transformers: the served ones, with a tiny config of every kind of layer, and the refused ones.

The tests run over these tables, and `make chart` writes docs/models.md from them. Imports nothing but the standard library.
"""

from typing import Any

VOCAB = 48
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [3.0, 4.0, 6.0, 8.0],
}
LOCAL = {"sliding_window": 12}
MIXED = {**LOCAL, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
WIDE = {"head_dim": 16}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
# Experts that groups choose from, next to a shared one, behind a dense layer.
GROUPED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
           "moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
          "v_head_dim": 8}  # fmt: skip
LATENT_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 64,
    }
}
# An indexer that chooses 96 keys of a context of 256 tokens.
INDEXED = {**GROUPED, **LATENT, "index_topk": 96, "index_n_heads": 2, "index_head_dim": 8}
SHARED_INDEXED = {**INDEXED, "indexer_types": ["full", "shared", "full"]}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}


# Families whose public checkpoints bring a module for multi-token prediction along, by model type: the layer's tensors.
MODULES = {
    "bailing_hybrid": "model.layers.{L+k}.*",
    "deepseek_v3": "model.layers.{L+k}.*",
    "deepseek_v32": "model.layers.{L+k}.*",
    "ernie4_5_moe": "model.mtp_block.{k}.*",
    "exaone_moe": "mtp.layers.{k}.*",
    "glm4_moe": "model.layers.{L+k}.*",
    "glm4_moe_lite": "model.layers.{L+k}.*",
    "glm_moe_dsa": "model.layers.{L+k}.*",
    "hy_v3": "model.layers.{L+k}.*",
    "mellum": "mtp.layers.{k}.*",
    "nemotron_h": "mtp.layers.*",
    "qwen3_5_text": "mtp.layers.{k}.*",
    "qwen3_next": "mtp.layers.{k}.*",
}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def ropes(full: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """A rotary table for each type of layer."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    return {"rope_parameters": {"full_attention": {**plain, **full}, "sliding_attention": {**plain, **local}}}


SCALED = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA_4_SCALE = rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5, beta_fast=32.0,
                     beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, max_position_embeddings=256)  # fmt: skip
HALF = rope("default", partial_rotary_factor=0.5)
GEMMA_4_ROPE = ropes({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, {})
GEMMA_ROPE = ropes({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, {})

# name: (model type, settings beside the tiny ones)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", {"num_key_value_heads": 4}),
    "llama-3": ("llama", {**SCALED, "attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "rope-linear": ("llama", rope("linear", factor=4.0)),
    "rope-yarn": ("llama", YARN),
    "rope-dynamic": ("llama", rope("dynamic", factor=4.0)),
    "mistral": ("mistral", {**LOCAL, "head_dim": 16}),
    "qwen-2": ("qwen2", {**LOCAL, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen-3": ("qwen3", {"head_dim": 16}),
    "phi-3": ("phi3", LOCAL),
    "gemma-2": ("gemma2", {**MIXED, "head_dim": 16, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
                           "final_logit_softcapping": 3.0}),
    "gemma-3": ("gemma3_text", {**MIXED, **GEMMA_ROPE, "head_dim": 16}),
    "gemma-4": ("gemma4_text", {**MIXED, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
                                "attention_k_eq_v": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                                "vocab_size_per_layer_input": VOCAB}),
    "gemma-4-e2b": ("gemma4_text", {**LOCAL, **GEMMA_4_ROPE, "head_dim": 8, "global_head_dim": 16,
                                    "num_global_key_value_heads": 1, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
                                    "layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True,
                                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}),
    "qwen-3-moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "gpt-2": ("gpt2", {"n_positions": 256}),
    "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4}),
}  # fmt: skip

# The other families, by model type: settings beside the tiny ones.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**MIXED, **EXPERTS, **WIDE, "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1,
              "moe_intermediate_size": 16, "route_scale": 1.5, "mup_enabled": True},
    "apertus": SCALED,
    "arcee": {"head_dim": 8, "attention_bias": True},
    "aria_text": {"head_dim": 8, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "beam": {**MIXED, **EXPERTS, **SPARSE, **WIDE, "num_experts": 4, "n_group": 2, "topk_group": 1,
             "moe_intermediate_size": 16, "final_logit_softcapping": 3.0},
    "axk1": {**GROUPED, **LATENT, "v_head_dim": 12},
    "axk2": {**INDEXED, "gated_norm_rank": 4},
    "biogpt": {},
    "bitnet": {},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {**MIXED, "head_dim": 8, "logit_scale": 0.5},
    "cohere2_moe": {**MIXED, **EXPERTS, **SPARSE, "head_dim": 8, "num_experts": 4, "num_shared_experts": 1,
                    "prefix_dense_intermediate_size": 16, "logit_scale": 0.5},
    "cohere_compass_text": {**MIXED, **ropes({}, {}), "head_dim": 8},
    "ctrl": {"n_positions": 256, "dff": 64},
    "cwm": {**MIXED, **SCALED, "head_dim": 8},
    "deepseek_v2": {**GROUPED, **LATENT},
    "deepseek_v32": {**INDEXED, **LATENT_YARN, "v_head_dim": 12},
    "deepseek_v3": {**GROUPED, **LATENT, **LATENT_YARN, "v_head_dim": 12},
    "dots3_note_text": {**INDEXED, "num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 12,
                        "layer_types": ["indexed_attention", "sliding_attention"] * 2, "swa_head_dim": 12,
                        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8,
                        "swa_kv_lora_rank": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
                        "moe_shared_expert_intermediate_size": 16},
    "dots1": {**GROUPED, **MIXED},
    "ernie4_5": {"head_dim": 8, "use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16,
                     "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "exaone4": {**MIXED, **SCALED},
    "exaone_moe": {**MIXED, **EXPERTS, **SPARSE, "num_experts": 4, "num_shared_experts": 1, "moe_intermediate_size": 16},
    "flint": {**MIXED, **EXPERTS, **WIDE, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0],
              "shared_expert_intermediate_size": 16},
    "flex_olmo": {**EXPERTS, "num_experts": 4},
    "gemma": {"head_dim": 16},
    "gemma3n_text": {**LOCAL, **ropes({}, {}), "head_dim": 8, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"] * 3, "hidden_size_per_layer_input": 8,
                     "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4, "altup_num_inputs": 2,
                     "intermediate_size": [64] * 6, "activation_sparsity_pattern": [0.5, 0.0] * 3},
    "gemma4_unified_text": FAMILIES["gemma-4"][1],
    "glm": {**HALF, **WIDE, "attention_bias": True},
    "glm4": {**HALF, **WIDE, "attention_bias": True},
    "glm4_moe": {**GROUPED, **HALF, "use_qk_norm": True, "attention_bias": True},
    "glm_moe_dsa": SHARED_INDEXED,
    "glm4_moe_lite": {**GROUPED, **SPARSE, **LATENT},
    "gpt_bigcode": {"n_positions": 256, "multi_query": True},
    "gpt_oss": {**MIXED, **EXPERTS, **YARN, "head_dim": 8, "num_local_experts": 4, "intermediate_size": 16},
    "gpt_neox": {**HALF, "use_parallel_residual": True},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, **EXPERTS, "num_local_experts": 4},
    "granite_swa": {**GRANITE, **MIXED, "layer_rope_theta": [1e4, 0, 1e5]},
    "granitemoe_swa": {**GRANITE, **MIXED, **EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 16},
    "granitemoeshared": {**GRANITE, **EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 16},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8, **rope("dynamic", alpha=100.0, factor=1.0)},
    "hy_v3": {**EXPERTS, **SPARSE, **WIDE, "num_experts": 4, "moe_intermediate_size": 16},
    "hy_v4": {**SHARED_INDEXED, **SPARSE, "hc_mult": 2, "learnable_sink_init": 0.5, "swiglu_limit": 2.0},
    "hyperclovax": {**GRANITE, "head_dim": 8},
    "internlm3": {"head_dim": 8},
    "iquestcoder": {"head_dim": 8},
    "jais2": {"head_dim": 8},
    "kolibri1": {**MIXED, **EXPERTS, **WIDE, "num_local_experts": 4, "moe_intermediate_size": 16,
                 "shared_expert_intermediate_size": 16},
    "laguna": {**MIXED, **EXPERTS, **SPARSE, **WIDE, **ropes({"partial_rotary_factor": 0.5}, {}), "num_experts": 4,
               "num_attention_heads_per_layer": [4, 8, 4], "moe_intermediate_size": 16,
               "shared_expert_intermediate_size": 16, "moe_router_logit_softcapping": 2.0},
    "longcat_flash": {**LATENT, "num_hidden_layers": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "moe_topk": 2,
                      "n_routed_experts": 4, "zero_expert_num": 2, "head_dim": 4},
    "mellum": {**MIXED, **EXPERTS, **WIDE, **ropes({"rope_theta": 5e5}, {}), "num_local_experts": 4,
               "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "mimo_v2_flash": {**MIXED, **EXPERTS, **SPARSE, **ropes({"partial_rotary_factor": 0.5}, {}), "head_dim": 8,
                      "v_head_dim": 6, "n_routed_experts": 4, "moe_intermediate_size": 16},
    "minicpm3": {**LATENT, "v_head_dim": 12, "dim_model_base": 16},
    "minimax_m2": {**EXPERTS, **WIDE, "num_local_experts": 4, "rotary_dim": 8},
    "ministral": {**MIXED, "head_dim": 8},
    "ministral3": {**LLAMA_4_SCALE, "head_dim": 8},
    "mistral4": {**GROUPED, **LATENT, **LLAMA_4_SCALE},
    "modernbert-decoder": {**MIXED, "local_attention": 24, **ropes({}, {"rope_theta": 1e5})},
    "nanochat": {"final_logit_softcapping": 3.0},
    "nemotron": {**HALF, "head_dim": 8},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": {**MIXED, **ropes({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {})},
    "olmoe": {**EXPERTS, "num_experts": 4, "clip_qkv": 2.0},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": True},
    "persimmon": HALF,
    "phi": {**HALF, "qk_layernorm": True},
    "phimoe": {**EXPERTS, **LOCAL, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {**EXPERTS, **LOCAL, "use_sliding_window": True, "max_window_layers": 1, "num_experts": 4,
                  "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2},
    "seed_oss": {"head_dim": 8, "attention_out_bias": True},
    "smollm3": {**MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
    "solar_open": {**GROUPED, **WIDE},
    "stablelm": {**HALF, "qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    "starcoder2": {**LOCAL, "use_bias": True},
    "vaultgemma": {**MIXED, "head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "youtu": {**LATENT, "v_head_dim": 12},
}  # fmt: skip

# Families with recurrent layers, by model type: settings in addition to the tiny ones.
_TYPES = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {**_TYPES, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8}  # fmt: skip
_DELTA_EXPERTS = {**_DELTA, **EXPERTS, **WIDE, "num_experts": 4, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_LATENT_EXPERTS = {**LATENT, **EXPERTS, "q_lora_rank": None, "num_local_experts": 4, "moe_intermediate_size": 16,
                   "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_TYPES, **_LATENT_EXPERTS, "head_dim": 8},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 32, "mamba_rms_norm": True, "ssm_in_multiplier": 0.7},
    "granitemoehybrid": {**_TYPES, **_MAMBA, **GRANITE, **EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 16},
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
              "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {**_TYPES, **_LATENT_EXPERTS, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": CONV,
    "lfm2_moe": {**CONV, **EXPERTS, "num_experts": 4, "num_dense_layers": 1, "moe_intermediate_size": 16},
    "lfm3": WIDE,
    "minimax": {**_TYPES, **EXPERTS, "head_dim": 8, "num_local_experts": 4, "block_size": 16,
                "linear_attn_beta_factor": 0.7},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
                   "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
                   "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 16,
                   "moe_shared_expert_intermediate_size": 16, "num_hidden_layers": 5},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "qwen3_5_moe_text": _DELTA_EXPERTS,
    "qwen3_5_text": {**_DELTA, **WIDE},
    "qwen3_next": {**_DELTA_EXPERTS, "decoder_sparse_step": 1},
}  # fmt: skip
# Every served family by model type.
SERVED: dict[str, dict[str, Any]] = dict(FAMILIES.values()) | MORE_FAMILIES | HYBRIDS

MROPE = rope("default", mrope_section=[1, 1, 2])
SMALL_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14}  # fmt: skip

# A quarter of each head turns, in three sections of the position in an image.
QWEN_ROPE = rope("default", mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25)
# Models for images or sound whose text part is served. Model type: that of the text part, its settings, those around it.
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "exaone4_5": ("exaone4", MORE_FAMILIES["exaone4"], {"vision_config": {**SMALL_VISION, "num_key_value_heads": 2}}),
    "gemma3": ("gemma3_text", FAMILIES["gemma-3"][1], {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "gemma4": ("gemma4_text", FAMILIES["gemma-4"][1],
               {"vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 2}, "audio_config": None}),
    "glm4v": ("glm4v_text", {**WIDE, **rope("default", mrope_section=[1, 1, 2], partial_rotary_factor=0.5)},
              {"vision_config": {**SMALL_VISION, "image_size": 28, "patch_size": 14}}),
    # behind a delta layer no layer shares the choice of an indexer
    "glm5_next": ("glm5_next_text",
                  {**INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"],
                   "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
                   "qk_rope_head_dim": 0, "linear_num_heads": 4, "linear_head_dim": 8, "index_kpool": 4, "hc_mult": 2},
                  {"vision_config": SMALL_VISION}),
    "idefics3": ("llama", {}, {"vision_config": VISION}),
    "internvl": ("qwen2", {}, {"vision_config": VISION}),
    "kimi_k25": ("deepseek_v3", MORE_FAMILIES["deepseek_v3"],
                 {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                    "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
                  "tie_word_embeddings": False}),
    "llava": ("llama", {}, {"vision_config": {**VISION, "model_type": "clip_vision_model"}}),
    "mistral_large4": ("mistral_large4_text",
                       {**{key: SHARED_INDEXED[key] for key in SHARED_INDEXED.keys() - {"q_lora_rank", "norm_topk_prob"}},
                        **YARN, "num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2,
                        "no_rope_layers": [1, 1, 0, 1], "kv_source_layers": [0, 0, 2, 0]},
                       {"vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}}),
    "mistral3": ("ministral3", MORE_FAMILIES["ministral3"],
                 {"vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}}),
    "qwen2_5_vl": ("qwen2_5_vl_text", MROPE, {"vision_config": SMALL_VISION}),
    "qwen2_vl": ("qwen2_vl_text", MROPE,
                 {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}}),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 8, **MROPE},
                 {"vision_config": {**SMALL_VISION, "deepstack_visual_indexes": [0]}}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {**EXPERTS, **MROPE, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
                     {"vision_config": {**SMALL_VISION, "deepstack_visual_indexes": [0]}}),
    "qwen3_5": ("qwen3_5_text", {**HYBRIDS["qwen3_5_text"], **QWEN_ROPE}, {"vision_config": SMALL_VISION}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**HYBRIDS["qwen3_5_moe_text"], **QWEN_ROPE}, {"vision_config": SMALL_VISION}),
    "step3p7": ("step3p5", {**MIXED, **SPARSE, **EXPERTS, **ropes({"partial_rotary_factor": 0.5}, {}), "head_dim": 8,
                            "n_routed_experts": 4, "moe_intermediate_size": 16, "share_expert_dim": 16,
                            "num_sliding_attention_heads": 8, "swiglu_limits": [0.0, 2.0, 2.0],
                            "swiglu_limits_shared": [0.0, 2.0, 2.0]}, {"vision_config": VISION}),
}  # fmt: skip

# Families that several ranks cannot share, by what the refusal says.
NO_PLAN = "no tensor-parallel plan"
NOT_OVER_RANKS = {
    "aria_text": "packed_rowwise", "biogpt": NO_PLAN, "bitnet": NO_PLAN, "ctrl": NO_PLAN,
    "gemma3n_text": "activation_sparsity", "gpt2": NO_PLAN,
    "gpt_bigcode": NO_PLAN, "longcat_flash": "moe_identity_expert",
    "modernbert-decoder": NO_PLAN, "opt": NO_PLAN, "persimmon": NO_PLAN, "stablelm": NO_PLAN,
}  # fmt: skip
# Families whose hidden states a draft head cannot read.
NO_FEATURES = {
    "biogpt", "ctrl", "gemma3n_text", "gpt2", "gpt_bigcode", "gpt_neox", "hy_v4", "modernbert-decoder", "opt",
}  # fmt: skip

RECURRENT = "recurrent layers"
NO_ATTENTION = "are recurrent, and no layer attends"
OTHER_LAYERS = "layers of types that Eyas does not support: {}"
NO_INTERFACE = "do not attend to the text through transformers' interface"
BOTH_WAYS = "attend in both directions"
ENCODER = "encoder-decoder"
ONCE = "a layer attends more than once"
ARGUMENTS = "attention arguments that Eyas does not support"
# What Eyas would need to serve them, as refusals say; an encoder-decoder is out of its scope.
NEEDED = {
    RECURRENT: "their functions over a draft tree",
    NO_ATTENTION: "contexts and memory that do not go by slots of keys",
    NO_INTERFACE: "attention code of its own for them",
    BOTH_WAYS: "tokens that are all known before the pass",
    ONCE: "several sets of keys for a layer",
    ARGUMENTS: "the meaning of these arguments in its attention",
    **{OTHER_LAYERS.format(kind): "a mask and keys of their kind" for kind in (
        "chunked_attention", "heavily_compressed_attention", "indexed_attention", "minimax_m3_sparse",
    )},
}  # fmt: skip
# Families that are refused: what the refusal says, and settings beside the tiny ones. None: no tiny config exists.
REFUSED: dict[str, tuple[str, dict[str, Any] | None]] = {
    **{kind: (RECURRENT, {}) for kind in (
        "inkling2_text", "inkling_text", "recurrent_gemma", "xlstm", "zaya",
    )},
    "falcon_mamba": (NO_ATTENTION, {}),
    "mamba": (NO_ATTENTION, {}),
    "mamba2": (NO_ATTENTION, None),
    "zamba": (NO_INTERFACE, {}),
    "zamba2": (ONCE, None),
    "deepseek_v4": (OTHER_LAYERS.format("heavily_compressed_attention"), {}),
    "qwen4_exp_text": (OTHER_LAYERS.format("indexed_attention"),
                       {"layer_types": ["linear_attention", "linear_attention", "indexed_attention"]}),
    "rwkv": (RECURRENT, {"attention_hidden_size": 32}),
    "llama4_text": (OTHER_LAYERS.format("chunked_attention"), {"layer_types": ["chunked_attention"] * 3}),
    "minimax_m3_vl_text": (OTHER_LAYERS.format("minimax_m3_sparse"),
                           {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}),
    **{kind: (NO_INTERFACE, {}) for kind in (
        "big_bird", "bloom", "blt", "codegen", "cpmant", "falcon", "git", "gpt_neox_japanese", "gptj", "hrm_text",
        "megatron-bert", "mpt", "openai-gpt", "reformer", "rembert", "roformer", "trocr", "xglm", "xlm",
    )},
    **dict.fromkeys(("gpt_neo", "xlnet"), (NO_INTERFACE, None)),
    **{kind: (BOTH_WAYS, {}) for kind in (
        "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
        "roc_bert", "xlm-roberta", "xlm-roberta-xl",
    )},
    **{kind: (ENCODER, {}) for kind in (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
        "whisper",
    )},
    "prophetnet": (ENCODER, None),
    "diffllama": (ONCE, {}),
    "doge": (ARGUMENTS, {}),
}  # fmt: skip

# Names that share the code of another family.
SAME_AS = {
    "gemma3n": "gemma3n_text", "gemma4_unified": "gemma4_unified_text", "gpt-sw3": "gpt2", "llama4": "llama4_text",
    "dots3_note": "dots3_note_text", "fuyu": "persimmon", "got_ocr2": "qwen2", "moss_transcribe_diarize": "qwen3",
    "kimi_k2": "deepseek_v3", "qwen4_exp": "qwen4_exp_text",
}  # fmt: skip
# No claim is made: they make images or sound, draft for one target, or do not run from their config alone.
NOT_JUDGED = {
    "dbrx", "emu3", "gemma4_assistant", "gemma4_unified_assistant", "jetmoe", "mllama", "moshi", "musicgen",
    "musicgen_melody", "phi4_multimodal", "xmod",
}  # fmt: skip
