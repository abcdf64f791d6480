"""Tiny random EAGLE heads in the checkpoint formats of several projects."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from eyas.models.checkpoint import WIRING_KEY
from eyas.models.heads.eagle import config_json
from eyas.models.heads.eagle_config import EagleHeadConfig, HeadWiring, tensor_shapes

TINY = EagleHeadConfig(
    kind="eagle3", target_hidden=32, hidden=32, intermediate=64, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=1,
    vocab_size=48, draft_vocab_size=24, rms_norm_eps=1e-5, rotary={"rope_theta": 10000.0, "rope_type": "default"},
    max_positions=256, wiring=HeadWiring((2, 2, 1)),
)  # fmt: skip
TINY_EAGLE1 = replace(TINY, kind="eagle", draft_vocab_size=48, wiring=HeadWiring((-1,), output="bare"), fc_bias=True)

Tensors = dict[str, torch.Tensor]
Written = tuple[dict[str, Any], Tensors]


def random_tensors(
    config: EagleHeadConfig, seed: int = 0, shipped: tuple[str, ...] = ("d2t", "t2d", "norm.weight")
) -> Tensors:
    """Weights for `config`: all required tensors, lm_head, and the optional ones in `shipped`."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    absent = config.optional_tensors - {*shipped, "lm_head.weight"}
    tensors = {name: _random(name, shape, generator) for name, shape in tensor_shapes(config).items() if name not in absent}
    if "d2t" in tensors:
        tensors["d2t"] = chosen - torch.arange(len(chosen))
    if "t2d" in tensors:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    return 1 + 0.2 * values if "norm" in name else 0.2 * values


def renamed(tensors: Tensors, *spellings: tuple[str, str]) -> Tensors:
    found = tensors
    for old, new in spellings:
        found = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in found.items()}
    return found


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def safeailab(c: EagleHeadConfig, tensors: Tensors) -> Written:
    return config_json(c), tensors


def specforge(c: EagleHeadConfig, tensors: Tensors) -> Written:
    """Layer ids count outputs, since they begin with 1; norm_output means the norm before lm_head."""
    config = without(config_json(c), "eagle_aux_hidden_state_layer_ids", WIRING_KEY)
    ids = (
        [tap - 1 for tap in c.aux_hidden_state_layers]
        if c.aux_hidden_state_layers[0] == 2
        else list(c.aux_hidden_state_layers)
    )
    nested = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    names = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
    return config | names | {"norm_output": c.wiring.output != "bare"}, tensors


def vllm(c: EagleHeadConfig, tensors: Tensors) -> Written:
    spelled = renamed(tensors, ("midlayer.", "model.layers.0."), ("d2t", "draft_id_to_target_id"), ("fc.", "model.fc."))
    return config_json(c) | {"architectures": ["Eagle3LlamaForCausalLM"]}, spelled


def speculators(c: EagleHeadConfig, tensors: Tensors) -> Written:
    flat = config_json(c)
    beside = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    config = {key: flat[key] for key in (*beside, "eagle_aux_hidden_state_layer_ids")} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny", "architectures": ["Llama"]}},
        "transformer_layer_config": without(flat, *beside, "architectures"),
        "embed_requires_grad": False,
    }
    return config, renamed(tensors, ("midlayer.", "layers.0."))


def sglang_layers(c: EagleHeadConfig, tensors: Tensors) -> Written:
    """All layers numbered, and the later ones with hidden_norm instead of input_layernorm."""
    config, tensors = specforge(c, tensors)
    later = tuple((f"layers.{i}.input_layernorm.", f"layers.{i}.hidden_norm.") for i in range(1, c.num_layers))
    return config, renamed(tensors, ("midlayer.", "layers.0."), *later)


CHECKPOINT_FORMATS: dict[str, Callable[[EagleHeadConfig, Tensors], Written]] = {
    "SafeAILab": safeailab,
    "SpecForge": specforge,
    "vLLM": vllm,
    "speculators": speculators,
    "SGLang layers": sglang_layers,
}
