"""Train Medusa heads (Cai et al. 2024) for a target: `python examples/train_medusa.py TEXT OUT`, TEXT from target_text.py.

Head i reads only the state at t and learns the target's prediction of the token at t + 2 + i. The checkpoint has vLLM's
layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from head_training import common_tokens, fit, output_rows, write
from target_text import DEMO, read_text
from torch import Tensor, nn


class Block(nn.Module):
    """x + SiLU(W x + b); the identity before training."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden)])
        nn.init.zeros_(self.layers[0].weight)
        nn.init.zeros_(self.layers[0].bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.layers[0](x))


class MedusaHeads(nn.Module):
    """Each head is a block and an output layer that starts as the target's."""

    def __init__(self, rows: Tensor, num_heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rows.shape[1]) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(rows.shape[1], len(rows), bias=False) for _ in range(num_heads))
        for output in self.lm_heads:
            output.weight.data.copy_(rows)

    def forward(self, states: Tensor, tokens: Tensor, head: int) -> Tensor:
        """Return logits [B, n, D] of the tokens head + 2 positions after the states [B, n, H]; `tokens` is unused."""
        return self.lm_heads[head](self.blocks[head](states))


def main(
    text: Path,
    out: Path,
    model: Annotated[str, typer.Option(help="Folder of the target.")] = str(DEMO / "target"),
    num_heads: Annotated[int, typer.Option()] = 4,
    vocabulary: Annotated[int, typer.Option(help="Size of the draft vocabulary: the most frequent tokens.")] = 2048,
    epochs: Annotated[int, typer.Option()] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train on TEXT and write a checkpoint to the folder OUT."""
    torch.manual_seed(seed)
    data = read_text(text)
    token_map = common_tokens(data, vocabulary)
    rows = output_rows(model, token_map)
    heads = MedusaHeads(rows, num_heads)
    fit(heads, data, rows, num_heads, epochs, seed)
    config = {"num_heads": num_heads, "num_hidden_layers": 1, "medusa_fc_bias": True, "truncated_vocab_size": vocabulary}
    write(out, heads, token_map, model, {"architectures": ["MedusaModel"], "model_type": "medusa"} | config)


if __name__ == "__main__":
    typer.run(main)
