"""Tiny random block heads and a P-EAGLE head for the tiny target, in the authors' layouts on disk."""

from dataclasses import replace
from pathlib import Path

import torch

from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.block import BlockHead, block_tensors, new_block_head, write_block_head
from eyas.models.heads.block_config import BlockHeadConfig
from eyas.models.heads.eagle_config import HeadWiring
from eyas.models.heads.layers import layer_shapes
from tests.support.tiny import head_tensors, write_checkpoint

DSPARK = BlockHeadConfig(
    kind="dspark", target_hidden=32, hidden=32, intermediate=48, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    num_target_layers=4, num_layers=2, vocab_size=48, draft_vocab_size=48, block_size=4, mask_token_id=2,
    rotary={"rope_theta": 10000.0, "rope_type": "default"}, max_positions=256,
    wiring=HeadWiring((2, 3), sample_from_anchor=True), windows=(None, None), markov_rank=8, confidence=True,
    confidence_with_markov=True,
)  # fmt: skip
DFLASH = replace(
    DSPARK, kind="dflash", block_size=5, wiring=HeadWiring((2, 3)), markov_rank=0, confidence=False,
    confidence_with_markov=False,
)  # fmt: skip
KINDS = {
    "dspark": DSPARK,
    "dspark-gated": replace(DSPARK, markov_kind="gated"),
    "dspark-rnn": replace(DSPARK, markov_kind="rnn", windows=(None, 12), causal_windows=True),
    "dspark-reduced": replace(DSPARK, draft_vocab_size=24),
    "dflash": DFLASH,
    "dflash-window": replace(DFLASH, windows=(6, None), causal_windows=True),
    "dflash2": replace(
        DFLASH, kind="dflash2", windows=(None, 6), conv_kernel=2, conv_group=8, selector_rank=4, selector_top_k=6
    ),
}


def random_block_head(kind: str, target: str, seed: int = 0) -> BlockHead:
    """A head whose every part has an effect."""
    torch.manual_seed(seed)
    head = new_block_head(KINDS[kind], target)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    if head.config.draft_vocab_size < head.config.vocab_size:
        head.draft_ids = torch.randperm(48)[: head.config.draft_vocab_size].sort().values
        head.lm_head.weight.data.normal_()
    return head


def tiny_block_head(kind: str, target: str) -> str:
    """Folder of a head of a kind, beside the target; written once."""
    folder = Path(f"{target}-{kind}")
    if not folder.exists():
        head = random_block_head(kind, target)
        write_block_head(folder, head.config, block_tensors(head))
    return str(folder)


def tiny_peagle_head(beside: str) -> str:
    """Folder of a P-EAGLE head of two layers, beside an EAGLE-3 head of the tiny target; written once."""
    folder = Path(f"{beside}-peagle")
    if not folder.exists():
        generator = torch.Generator().manual_seed(3)
        tensors = head_tensors(48, 24, 32) | {"mask_hidden": torch.randn(1, 1, 96, generator=generator)}
        sizes = replace(DSPARK, intermediate=64)
        layer = {"input_layernorm.weight": (32,)} | layer_shapes(sizes, 32)
        for name, shape in layer.items():
            values = 0.2 * torch.randn(shape, generator=generator)
            tensors[f"layers.1.{name}"] = 1 + values if "norm" in name else values
        own = {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "ptd_token_id": 2}
        write_checkpoint(folder, {**Checkpoint(beside).config, **own}, tensors)
    return str(folder)
