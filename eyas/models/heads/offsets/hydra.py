"""Hydra heads (Ankner et al. 2024), grounded, mlp and prefix-mlp, in the authors' layout: states and tokens in, logits out.

Legend: R rows, M heads, n residual blocks of each, H target hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.checkpoint import check_device, read_config, read_target_config, read_tensor, read_tensors, resolve, take
from eyas.models.heads.config import whole_number
from eyas.models.heads.eagle import EMBEDDING_NAMES
from eyas.models.heads.offsets.prefix import PREFIX, PREFIX_OPTIONAL, PrefixLayer, PrefixSizes, prefix_layout
from eyas.models.heads.offsets.vocabulary import check_target, draft_ids

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
ARCHITECTURES = ("mlp", "prefix-mlp")


@dataclass(frozen=True)
class HydraConfig:
    """What a Hydra checkpoint's config says. step: how far modules of one kind stand apart in the names; first: the first
    one's number."""

    num_heads: int
    num_layers: int
    prefixed: bool

    @property
    def step(self) -> int:
        return 2 if self.prefixed else 1

    @property
    def first(self) -> int:
        return 1 if self.prefixed else 0


class HydraHead(nn.Module):
    """Head i guesses, from the state behind token t and the embeddings of t + 1 to t + 1 + i, the token at t + 2 + i.

    embedding: the target's, [V, H]. prefix: of prefix-mlp, makes those states of the target's. draft_ids maps draft ids to
    the target's.
    """

    def __init__(
        self, heads: Sequence[nn.Module], embedding: Tensor, draft_ids: Tensor, prefix: PrefixLayer | None = None
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.prefix = prefix
        self.register_buffer("draft_ids", draft_ids)
        self.draft_ids: Tensor

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        """Draft logits float32 [..., D] of one head; inputs [..., (head + 2) * H]: the state, then the embeddings."""
        return self.heads[head](inputs).float()  # type: ignore[no-any-return]


class OneHead(nn.Module):
    """A grounded block, which leads from (i + 2) * H to H, further residual blocks, and an output layer."""

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], output: Tensor, bias: Tensor | None) -> None:
        """blocks: weight and bias of each; the first one's are those of its two layers, one above the other."""
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight, _ in blocks)
        self.biases = nn.ParameterList(nn.Parameter(bias, requires_grad=False) for _, bias in blocks)
        self.output = nn.Parameter(output, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        straight, bent = F.linear(x, self.weights[0], self.biases[0]).chunk(2, -1)
        x = straight + F.silu(bent)
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            x = x + F.silu(F.linear(x, weight, bias))
        return F.linear(x, self.output, self.bias)


def load_hydra(path_or_id: str, target: str, dtype: str = "float32", device: str = "cpu") -> HydraHead:
    """Load heads strictly, with the target's embedding. Raises CheckpointError for another architecture, and when
    anything is missing, left over or does not fit the target."""
    check_device(dtype, device)
    folder, target_folder = resolve(path_or_id), resolve(target)
    sizes = read_target_config(target_folder)
    hidden, vocab = (whole_number(sizes, key, "the target's config") for key in ("hidden_size", "vocab_size"))
    config, tensors = hydra_config(folder), read_tensors(folder, FILES)
    check_target(tensors, hidden, vocab, folder)
    ids = draft_ids(tensors, vocab, folder)
    expected, optional = _layout(config, hidden, vocab, len(ids)), {"input_embed_fn.weight"}
    optional |= {name for name in expected if name.startswith("hydra_lm_head.") and name.endswith(".bias")}
    prefix_sizes = PrefixSizes.of(target_folder) if config.prefixed else None
    if prefix_sizes:
        expected |= prefix_layout(prefix_sizes, vocab)
        optional |= PREFIX_OPTIONAL
    _untie(tensors, config)
    take(tensors, expected, optional, folder)
    shipped = tensors.pop("input_embed_fn.weight", None)
    embedding = read_tensor(target_folder, EMBEDDING_NAMES) if shipped is None else shipped
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    prefix = PrefixLayer(prefix_sizes, _inside(cast, PREFIX), target_folder) if prefix_sizes else None
    heads = [_head(cast, config, index) for index in range(config.num_heads)]
    return HydraHead(heads, embedding.to(getattr(torch, dtype)), ids, prefix).to(torch.device(device))


def hydra_config(folder: Path) -> HydraConfig:
    """Raises CheckpointError for what is not run here."""
    config, source = read_config(folder), folder / "config.json"
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{source}: hydra_head_arch is {architecture!r}; Eyas runs {' and '.join(ARCHITECTURES)} only")
    _demand(config, "grounded_heads", True, source)
    _demand(config, "hidden_state_offset", 0, source)
    heads, layers = (whole_number(config, key, source) for key in ("hydra_num_heads", "hydra_num_layers"))
    return HydraConfig(heads, layers, architecture == "prefix-mlp")


def _demand(config: Mapping[str, Any], key: str, value: object, source: Path) -> None:
    if config.get(key, value) != value:
        raise CheckpointError(f"{source}: {key} is {config[key]!r}; Eyas runs Hydra heads with {value!r} only")


def _layout(c: HydraConfig, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all but the prefix layer."""
    shapes: dict[str, tuple[int, ...]] = {"input_embed_fn.weight": (vocab, hidden)}
    for head in range(c.num_heads):
        for layer in range(c.num_layers):
            width = (head + 2) * hidden if layer == 0 else hidden
            for part in ("linear", "res_connection") if layer == 0 else ("linear",):
                name = f"{_block(c, head, layer)}.{part}"
                shapes |= {f"{name}.weight": (hidden, width), f"{name}.bias": (hidden,)}
        shapes |= {f"{_output(c, head)}.weight": (draft_vocab, hidden), f"{_output(c, head)}.bias": (draft_vocab,)}
    return shapes


def _block(c: HydraConfig, head: int, layer: int) -> str:
    return f"hydra_mlp.{head}.{c.first + c.step * layer}"


def _output(c: HydraConfig, head: int) -> str:
    return f"hydra_lm_head.{head}" + (f".{c.first}" if c.prefixed else "")


def _untie(tensors: dict[str, Tensor], c: HydraConfig) -> None:
    """Blocks behind a head's first are one instance, repeated, of which a safetensors file may keep one only."""
    for head in range(c.num_heads):
        for layer in range(2, c.num_layers):
            for part in ("linear.weight", "linear.bias"):
                second = tensors.get(f"{_block(c, head, 1)}.{part}")
                if second is not None:
                    tensors.setdefault(f"{_block(c, head, layer)}.{part}", second)


def _head(tensors: Mapping[str, Tensor], c: HydraConfig, head: int) -> OneHead:
    first = _inside(tensors, f"{_block(c, head, 0)}.")
    grounded = [torch.cat([first[f"{part}.{kind}"] for part in ("res_connection", "linear")]) for kind in ("weight", "bias")]
    blocks = [(grounded[0], grounded[1])]
    for layer in range(1, c.num_layers):
        block = _inside(tensors, f"{_block(c, head, layer)}.")
        blocks.append((block["linear.weight"], block["linear.bias"]))
    output = _output(c, head)
    return OneHead(blocks, tensors[f"{output}.weight"], tensors.get(f"{output}.bias"))


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
