"""Tiny random Medusa and Hydra heads for the tiny target, in their authors' layouts on disk."""

from pathlib import Path

import torch

from tests.support.tiny import layer_shapes, write_checkpoint

KINDS = ("medusa", "hydra", "hydra-prefix")

Shapes = dict[str, tuple[int, ...]]


def tiny_heads(kind: str, beside: str, heads: int = 3, layers: int = 2) -> str:
    """Folder of heads of a kind, beside another folder; written once."""
    folder = Path(beside).parent / f"{kind}-{heads}-{layers}"
    if not folder.exists():
        write_checkpoint(folder, config_of(kind, heads, layers), tensors_of(kind, heads, layers))
    return str(folder)


def config_of(kind: str, heads: int = 3, layers: int = 2) -> dict[str, object]:
    """Of Medusa's settings none can be relied on: uploaded ones say two heads where there are five."""
    if kind == "medusa":
        return {"medusa_num_heads": 2, "medusa_num_layers": layers}
    arch = "prefix-mlp" if kind == "hydra-prefix" else "mlp"
    return {"hydra_num_heads": heads, "hydra_num_layers": layers, "hydra_head_arch": arch, "grounded_heads": True}


def tensors_of(kind: str, heads: int = 3, layers: int = 2, vocab: int = 48, hidden: int = 32) -> dict[str, torch.Tensor]:
    """Random weights of every tensor that the authors' code saves."""
    shapes = medusa_shapes(heads, layers, vocab, hidden) if kind == "medusa" else {}
    if kind != "medusa":
        shapes = hydra_shapes(heads, layers, vocab, hidden, kind == "hydra-prefix")
    generator = torch.Generator().manual_seed(len(kind))
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + tensor if "norm" in name else tensor for name, tensor in tensors.items()}


def medusa_shapes(heads: int, layers: int, vocab: int, hidden: int) -> Shapes:
    """Blocks, and behind them the output layer."""
    shapes: Shapes = {}
    for head in range(heads):
        for layer in range(layers):
            shapes |= {f"{head}.{layer}.linear.weight": (hidden, hidden), f"{head}.{layer}.linear.bias": (hidden,)}
        shapes[f"{head}.{layers}.weight"] = (vocab, hidden)
    return shapes


def hydra_shapes(heads: int, layers: int, vocab: int, hidden: int, prefixed: bool) -> Shapes:
    """With a prefix layer, modules are numbered with the dropouts between them."""
    shapes: Shapes = {}
    for head in range(heads):
        for layer in range(layers):
            block = f"hydra_mlp.{head}.{2 * layer + 1 if prefixed else layer}"
            width = (head + 2) * hidden if layer == 0 else hidden
            for part in ("linear", "res_connection")[: 2 if layer == 0 else 1]:
                shapes |= {f"{block}.{part}.weight": (hidden, width), f"{block}.{part}.bias": (hidden,)}
        output = f"hydra_lm_head.{head}.1" if prefixed else f"hydra_lm_head.{head}"
        shapes |= {f"{output}.weight": (vocab, hidden), f"{output}.bias": (vocab,)}
    return shapes | (prefix_shapes(vocab, hidden) if prefixed else {})


def prefix_shapes(vocab: int, hidden: int) -> Shapes:
    """A one-layer Llama with 4 query heads and 2 key-value heads."""
    prefix, norms = "prefix_embeding_layer", ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    others = {f"{prefix}.{name}.weight": (hidden,) for name in norms}
    return layer_shapes(f"{prefix}.layers.0", hidden, hidden) | others | {f"{prefix}.embed_tokens.weight": (vocab, hidden)}
