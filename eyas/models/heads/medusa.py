"""Medusa heads (Cai et al. 2024), in the authors' layout or vLLM's: final states in, draft logits of every offset out.

Legend: S states, M heads, n residual blocks of each, H target hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.config.engine import INT8
from eyas.config.file_values import get_setting
from eyas.device.placement import check_device
from eyas.errors import CheckpointError
from eyas.models.checkpoint import CheckpointSource, check_tensors, open_checkpoint
from eyas.models.heads.layers import FP8, frozen, linear, quantise_head, take_draft_ids

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class MedusaHead(nn.Module):
    """Head i guesses, from the state behind token t, the token at t + 2 + i. draft_ids maps draft ids to the target's."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], outputs: Tensor, draft_ids: Tensor) -> None:
        """weights [M, H, H] and biases [M, 1, H] of each of the n blocks; outputs [M, D, H], or [1, D, H] if heads share."""
        super().__init__()
        self.num_heads, self.hidden = weights[0].shape[:2]
        self.weights = nn.ParameterList(map(frozen, weights))
        self.biases = nn.ParameterList(map(frozen, biases))
        self.outputs = frozen(outputs)
        self.register_buffer("draft_ids", draft_ids)
        self.draft_ids: Tensor
        self.narrow: nn.ModuleList | None = None  # by head, its blocks and its output layer with weights of 8 bits

    def quantise(self, device: torch.device, quantization: str) -> None:
        """Round all weights to 8 bits. Heads then take products of their own. Raises ConfigError as `quantise_head`."""
        outputs = [linear(output) for output in self.outputs]
        layers = list(zip(self.weights, self.biases, strict=True))
        blocks = [nn.ModuleList(linear(w[head], b[head, 0]) for w, b in layers) for head in range(self.num_heads)]
        quantise_head(own := nn.ModuleList(outputs), device, quantization)
        quantise_head(narrow := nn.ModuleList(blocks), device, quantization)
        for head, parts in enumerate(blocks):
            parts.append(own[min(head, len(own) - 1)])
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.narrow, self.outputs = narrow, frozen(self.outputs[:0].clone())

    def logits(self, states: Tensor, count: int) -> Tensor:
        """Return draft logits float32 [S, count, D] of the first `count` heads; states [S, H]."""
        if self.narrow is not None:
            return torch.stack([self._narrow_logits(states, number) for number in range(count)], 1)
        x = states.expand(count, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:count], x, weight[:count].transpose(1, 2)))
        outputs = self.outputs[:count].expand(count, -1, -1)
        return torch.bmm(x, outputs.transpose(1, 2)).transpose(0, 1).float()

    def _narrow_logits(self, states: Tensor, number: int) -> Tensor:
        """Return draft logits float32 [S, D] of a head with weights of 8 bits."""
        assert self.narrow is not None
        parts = self.narrow[number]
        assert isinstance(parts, nn.ModuleList)
        for block in parts[:-1]:
            states = states + F.silu(block(states))
        return parts[-1](states).float()  # type: ignore[no-any-return]


def load_medusa(
    checkpoint: CheckpointSource,
    target: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
    quantization: str = "",
) -> MedusaHead:
    """Load as many heads as the file holds. quantization: as `drafting.quantization`.

    Raises CheckpointError for tensors that are missing, left over or do not fit the target, and ConfigError as
    `quantise_head`.
    """
    check_device(dtype, device)
    checkpoint = open_checkpoint(checkpoint)
    folder, sizes = checkpoint.folder, open_checkpoint(target).text_config
    hidden, vocab = (get_setting(int, sizes, key, "the target's config") for key in ("hidden_size", "vocab_size"))
    config, tensors = checkpoint.head_config, _canonical_names(checkpoint.tensors(MEDUSA_FILES))
    shared = bool(config.get("original_lm_head")) or "lm_head.weight" in tensors
    if shared:
        tensors = _share_output(tensors)
    ids = take_draft_ids(tensors, hidden, vocab, folder)
    heads, layers = _count(tensors, r"blocks\.(\d+)\.", folder), _count(tensors, r"blocks\.0\.layers\.(\d+)\.", folder)
    num_outputs = 1 if shared else heads
    expected: dict[str, tuple[int, ...]] = {f"lm_heads.{head}.weight": (len(ids), hidden) for head in range(num_outputs)}
    expected |= _block_shapes(heads, layers, "weight", (hidden, hidden))
    if any(name.endswith(".bias") for name in tensors):
        expected |= _block_shapes(heads, layers, "bias", (hidden,))
    check_tensors(tensors, expected, (), folder)
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    no_bias = torch.zeros(hidden, dtype=getattr(torch, dtype))
    names = [[f"blocks.{head}.layers.{layer}" for head in range(heads)] for layer in range(layers)]
    weights = [torch.stack([cast[f"{block}.weight"] for block in blocks]) for blocks in names]
    biases = [torch.stack([cast.get(f"{block}.bias", no_bias)[None] for block in blocks]) for blocks in names]
    scale = get_setting(float, config, "logit_scale", checkpoint.config_file, 1.0)
    outputs = torch.stack([cast[f"lm_heads.{head}.weight"] for head in range(num_outputs)]) * scale
    head = MedusaHead(weights, biases, outputs, ids).to(torch.device(device))
    if quantization in (FP8, INT8):
        head.quantise(torch.device(device), quantization)
    return head


def _block_shapes(heads: int, layers: int, part: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"blocks.{head}.layers.{layer}.{part}": shape for head in range(heads) for layer in range(layers)}


def _canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under vLLM's names. The authors' layout numbers a head's output layer behind its blocks:

        0.0.linear.weight  ->  blocks.0.layers.0.weight
        0.1.weight         ->  lm_heads.0.weight

    Its blocks behind the first are one instance, repeated; a safetensors file may keep the first only.
    """
    plain = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in tensors.items()}
    layers = max((int(found[1]) for name in plain if (found := re.fullmatch(r"\d+\.(\d+)\.weight", name))), default=0)
    named = {re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name): tensor for name, tensor in plain.items()}
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
    """Return one output layer for all heads, under the first head's name; output layers of other heads are dropped."""
    rest = {name: tensor for name, tensor in tensors.items() if not re.match(r"lm_heads?\.", name)}
    first = tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight"))
    return rest if first is None else {**rest, "lm_heads.0.weight": first}


def _count(tensors: Mapping[str, Tensor], pattern: str, source: Path) -> int:
    """Return one more than the highest number in names that match the pattern."""
    found = [int(match[1]) for name in tensors if (match := re.match(pattern, name))]
    if not found:
        raise CheckpointError(
            f"{source} holds no Medusa heads: expected tensors such as 0.0.linear.weight or blocks.0.layers.0.weight, "
            f"found {', '.join(sorted(tensors)[:3]) or 'none'}"
        )
    if max(found) >= len(tensors):  # a number that no file of this size can have made
        raise CheckpointError(f"{source} names a Medusa head or layer {max(found)}, but holds {len(tensors)} tensors")
    return max(found) + 1
