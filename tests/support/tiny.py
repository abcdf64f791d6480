"""Tiny real models for tests: a random Llama and a random EAGLE-3 head, in their public layouts on disk."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.engine.build import assemble_engine, load_model
from eyas.engine.engine import Engine
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.loading import load_target
from eyas.models.target import TargetModel

DEMO = Path("models/demo")


def write_target(
    folder: Path, vocab_size: int = 48, hidden: int = 32, layers: int = 4, seed: int = 0, max_model_len: int = 256
) -> Path:
    """A random Llama with grouped-query heads; sharp enough that a softmax is not flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_model_len, initializer_range=0.25,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_checkpoint(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """A checkpoint of one file, in a folder that is made if need be."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, Path(folder, "model.safetensors"))
    return str(folder)


def change_config(folder: str | Path, **settings: Any) -> None:
    """Give the config.json of a checkpoint other settings; None leaves one out."""
    file = Path(folder, "config.json")
    changed = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


def change_tensors(folder: str | Path, **tensors: torch.Tensor | None) -> None:
    """Give a checkpoint of one file other tensors; None leaves one out."""
    file = Path(folder, "model.safetensors")
    changed = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
    save_file(changed, file, {"format": "pt"})


def write_spelling_tokenizer(folder: Path) -> None:
    """A tokenizer for `write_target` of default sizes: characters of JSON, and some tokens of several characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = [*'{}[]":,-. ', *"0123456789", *"abcdefklnqrstuvxyz", '":', '",', '{"', "true", "ab", "12", "ddd"]
    names = ["<bos>", "<eos>", "<pad>", *(piece.replace(" ", "\u0120") for piece in pieces)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_small(target: str) -> str:
    """A small random model beside a `write_target` of default sizes, with its vocabulary; written once."""
    folder = Path(f"{target}-small")
    if not folder.exists():
        write_target(folder, hidden=16, layers=2, seed=7)
    return str(folder)


def layer_shapes(layer: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Of the matrices of a Llama layer of 4 query heads and 2 key-value heads, whose attention reads `width` values."""
    shapes = {
        "self_attn.q_proj": (hidden, width), "self_attn.k_proj": (hidden // 2, width),
        "self_attn.v_proj": (hidden // 2, width), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (2 * hidden, hidden), "mlp.up_proj": (2 * hidden, hidden), "mlp.down_proj": (hidden, 2 * hidden),
    }  # fmt: skip
    return {f"{layer}.{name}.weight": shape for name, shape in shapes.items()}


def head_tensors(vocab_size: int, draft_vocab: int, hidden: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of a head with 4 query heads and 2 key-value heads, in the public layout."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (hidden, 3 * hidden), **layer_shapes("midlayer", hidden, 2 * hidden)}
    shapes["lm_head.weight"] = (draft_vocab, hidden)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    chosen = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def write_head(folder: Path, vocab_size: int = 48, draft_vocab: int = 24, hidden: int = 32, seed: int = 0) -> Path:
    """A random EAGLE-3 head for `write_target` with the same sizes."""
    config = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": vocab_size, "draft_vocab_size": draft_vocab, "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }  # fmt: skip
    write_checkpoint(folder, config, head_tensors(vocab_size, draft_vocab, hidden, seed))
    return folder


def write_eagle1_head(folder: Path, vocab_size: int = 48, hidden: int = 32, seed: int = 0) -> Path:
    """A random EAGLE-1 head for `write_target` with the same sizes, with a bias in fc."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,), **layer_shapes("layers.0", hidden, hidden)}
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5, "bias": True,
    }  # fmt: skip
    write_checkpoint(folder, config, tensors)
    return folder


@lru_cache
def shared_target(folder: str, aux_hidden_state_layers: tuple[int, ...] = ()) -> TargetModel:
    """A target that all engines of this process share: to load one takes as long as a short test."""
    return load_target(folder, aux_hidden_state_layers=aux_hidden_state_layers)


@contextmanager
def token_without_numbers(engine: Engine, token: int) -> Iterator[None]:
    """While the context is open, logits behind this token are not numbers."""
    weight = engine.runner.target.model.get_input_embeddings().weight
    with torch.no_grad():
        before = weight[token].clone()
        weight[token] = float("nan")
        try:
            yield
        finally:
            weight[token] = before


def fixed_config(**settings: Any) -> EngineConfig:
    """A config whose draft trees are as large as they may be: others depend on how long steps take."""
    return EngineConfig(**{"draft_budget": "fixed"} | settings)


def build_engine(
    target: str,
    fuser: FeatureFuser | None,
    dtype: str,
    device: str,
    engine: EngineConfig,
    tree: TreeConfig,
    drafter: Drafter | None,
) -> Engine:
    """An engine over a target that is shared if it is of the usual kind, else loaded for it."""
    if (dtype, device, engine.max_model_len) == ("float32", "cpu", EngineConfig().max_model_len):
        model = shared_target(target, fuser.aux_hidden_state_layers if fuser else ())
    else:
        model = load_model(target, fuser, dtype, device, engine)
    return assemble_engine(model, fuser, engine, tree, drafter)
