"""Medusa heads (Cai et al. 2024), in the authors' layout or vLLM's: final states in, draft logits of every offset out.

Legend: S states, M heads, n residual blocks of each, H target hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.checkpoint import (
    check_device,
    get_int,
    read_config,
    read_target_config,
    read_tensors,
    resolve,
    take,
)
from eyas.models.heads.features import check_target, draft_ids

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class MedusaHead(nn.Module):
    """Head i guesses, from the state behind token t, the token at t + 2 + i. draft_ids maps draft ids to the target's."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], outputs: Tensor, draft_ids: Tensor) -> None:
        """weights [M, H, H] and biases [M, 1, H] of each of the n blocks; outputs [M, D, H], or [1, D, H] if heads share."""
        super().__init__()
        self.num_heads, self.hidden = weights[0].shape[:2]
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
        self.biases = nn.ParameterList(nn.Parameter(bias, requires_grad=False) for bias in biases)
        self.outputs = nn.Parameter(outputs, requires_grad=False)
        self.register_buffer("draft_ids", draft_ids)
        self.draft_ids: Tensor

    def logits(self, states: Tensor, count: int) -> Tensor:
        """Draft logits float32 [S, count, D] of the first `count` heads; states [S, H]."""
        x = states.expand(count, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:count], x, weight[:count].transpose(1, 2)))
        outputs = self.outputs[:count].expand(count, -1, -1)
        return torch.bmm(x, outputs.transpose(1, 2)).transpose(0, 1).float()


def load_medusa(path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu") -> MedusaHead:
    """Load heads strictly, as many as the file holds. Raises CheckpointError when anything is missing, left over or does not
    fit the target."""
    check_device(dtype, device)
    folder = resolve(path_or_id)
    sizes = read_target_config(resolve(target))
    hidden, vocab = (get_int(sizes, key, "the target's config") for key in ("hidden_size", "vocab_size"))
    config, tensors = read_config(folder), _named_alike(read_tensors(folder, FILES))
    shared = bool(config.get("original_lm_head")) or "lm_head.weight" in tensors
    if shared:
        tensors = _share_output(tensors)
    check_target(tensors, hidden, vocab, folder)
    ids = draft_ids(tensors, vocab, folder)
    heads, layers = _count(tensors, r"blocks\.(\d+)\.", folder), _count(tensors, r"blocks\.0\.layers\.(\d+)\.", folder)
    num_outputs = 1 if shared else heads
    expected = _blocks(heads, layers, "weight", (hidden, hidden)) | _outputs(num_outputs, (len(ids), hidden))
    if any(name.endswith(".bias") for name in tensors):
        expected |= _blocks(heads, layers, "bias", (hidden,))
    take(tensors, expected, set(), folder)
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    weights = [torch.stack([cast[f"blocks.{i}.layers.{j}.weight"] for i in range(heads)]) for j in range(layers)]
    none = torch.zeros(hidden, dtype=getattr(torch, dtype))
    biases = [
        torch.stack([cast.get(f"blocks.{i}.layers.{j}.bias", none)[None] for i in range(heads)]) for j in range(layers)
    ]
    outputs = torch.stack([cast[f"lm_heads.{i}.weight"] for i in range(num_outputs)]) * _scale(config, folder)
    return MedusaHead(weights, biases, outputs, ids).to(torch.device(device))


def _blocks(heads: int, layers: int, part: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A part of every block, by vLLM's names."""
    return {f"blocks.{head}.layers.{layer}.{part}": shape for head in range(heads) for layer in range(layers)}


def _outputs(count: int, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    return {f"lm_heads.{head}.weight": shape for head in range(count)}


def _named_alike(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """vLLM's names for the authors'. In their layout an output layer is numbered behind its blocks; these are one instance,
    repeated, of which a safetensors file may keep the first only."""
    plain = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in tensors.items()}
    layers = max((int(found[1]) for name in plain if (found := re.fullmatch(r"\d+\.(\d+)\.weight", name))), default=0)
    named = {}
    for name, tensor in plain.items():
        named[re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)] = tensor
    for name in [name for name in named if re.fullmatch(rf"\d+\.{layers}\.weight", name)]:
        head = int(name.split(".")[0])
        named[f"lm_heads.{head}.weight"] = named.pop(name)
        for layer in range(1, layers):
            for part in ("weight", "bias"):
                first = named.get(f"blocks.{head}.layers.0.{part}")
                if first is not None:
                    named.setdefault(f"blocks.{head}.layers.{layer}.{part}", first)
    return named


def _share_output(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One output layer for all heads, under the first one's name; those of other heads are not looked at."""
    rest = {name: tensor for name, tensor in tensors.items() if not re.match(r"lm_heads?\.", name)}
    first = tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight"))
    return rest if first is None else {**rest, "lm_heads.0.weight": first}


def _count(tensors: Mapping[str, Tensor], pattern: str, source: Path) -> int:
    """One more than the highest number that stands in a name."""
    found = [int(match[1]) for name in tensors if (match := re.match(pattern, name))]
    if not found:
        raise CheckpointError(
            f"{source} holds no Medusa heads: expected tensors such as 0.0.linear.weight or blocks.0.layers.0.weight, "
            f"found {', '.join(sorted(tensors)[:3]) or 'none'}"
        )
    return max(found) + 1


def _scale(config: Mapping[str, Any], source: Path) -> float:
    scale = config.get("logit_scale", 1.0)
    if not isinstance(scale, int | float):
        raise CheckpointError(f"{source / 'config.json'}: logit_scale is {scale!r}; it must be a number")
    return float(scale)
