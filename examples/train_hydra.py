"""Train Hydra heads (Ankner et al. 2024) for a target: `python examples/train_hydra.py TEXT OUT`, TEXT from target_text.py.

Head i reads the state at t and the tokens up to t + 1 + i, and learns the target's prediction of the next token. The
checkpoint has the authors' layout (mlp, grounded), with a map of the draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from head_training import common_tokens, fit, output_rows, write
from safetensors.torch import load_file
from target_text import DEMO, read_text
from torch import Tensor, nn


class Grounded(nn.Module):
    """R x + SiLU(W x + b); before training it returns the state and ignores the tokens."""

    def __init__(self, hidden: int, num_tokens: int) -> None:
        super().__init__()
        self.linear, self.res_connection = (nn.Linear(hidden * (num_tokens + 1), hidden) for _ in range(2))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.eye_(self.res_connection.weight)
        nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class HydraHeads(nn.Module):
    """Each head is a block over the state and the tokens' embeddings, and an output layer that starts as the target's."""

    def __init__(self, rows: Tensor, embedding: Tensor, num_heads: int) -> None:
        super().__init__()
        self.hydra_mlp = nn.ModuleList(nn.ModuleList([Grounded(rows.shape[1], head + 1)]) for head in range(num_heads))
        self.hydra_lm_head = nn.ModuleList(nn.Linear(rows.shape[1], len(rows)) for _ in range(num_heads))
        for output in self.hydra_lm_head:
            output.weight.data.copy_(rows)
            nn.init.zeros_(output.bias)
        self.register_buffer("embedding", embedding, persistent=False)

    def forward(self, states: Tensor, tokens: Tensor, head: int) -> Tensor:
        """Return logits [B, n, D] from states [B, n, H] and the head + 1 tokens that follow each; tokens [B, n + head]."""
        embedded, count = F.embedding(tokens, self.embedding), states.shape[1]
        inputs = torch.cat([states, *(embedded[:, i : i + count] for i in range(head + 1))], -1)
        return self.hydra_lm_head[head](self.hydra_mlp[head][0](inputs))


def main(
    text: Path,
    out: Path,
    model: Annotated[str, typer.Option(help="Folder of the target.")] = str(DEMO / "target"),
    num_heads: Annotated[int, typer.Option()] = 3,
    vocabulary: Annotated[int, typer.Option(help="Size of the draft vocabulary: the most frequent tokens.")] = 2048,
    epochs: Annotated[int, typer.Option()] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train on TEXT and write a checkpoint to the folder OUT."""
    torch.manual_seed(seed)
    data = read_text(text)
    token_map = common_tokens(data, vocabulary)
    rows = output_rows(model, token_map)
    embedding = load_file(Path(model, "model.safetensors"))["model.embed_tokens.weight"].float()
    heads = HydraHeads(rows, embedding, num_heads)
    fit(heads, data, rows, num_heads, epochs, seed)
    config = {"hydra_num_heads": num_heads, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    write(out, heads, token_map, model, {"model_type": "hydra"} | config)


if __name__ == "__main__":
    typer.run(main)
