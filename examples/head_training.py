"""Shared by the trainers of Medusa and Hydra heads: the loss, the training loop and the checkpoint.

Legend: B windows, L tokens of each, H hidden width, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from target_text import Text
from torch import Tensor, nn

BATCH = 8
PEAK_RATE = 2e-3
HEAD_WEIGHT = 0.8


def common_tokens(data: Text, count: int) -> Tensor:
    """Return the ids of the `count` most frequent tokens, ascending, int64 [D]."""
    return torch.bincount(data.tokens.flatten()).topk(count).indices.sort().values


def output_rows(target: str, ids: Tensor) -> Tensor:
    """Return the rows of the target's output layer for the tokens `ids`, float32 [D, H]."""
    return load_file(Path(target, "model.safetensors"))["lm_head.weight"][ids].float()


def fit(heads: nn.Module, data: Text, rows: Tensor, num_heads: int, epochs: int, seed: int) -> None:
    """Train `heads` with AdamW on `loss`; the learning rate warms up over 50 steps and then falls by a cosine.

    heads(states [B, n, H], tokens [B, n + h], h) returns the logits of head h, [B, n, D]. tokens[:, i] follows states[:, i].
    """
    optimiser = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    steps = epochs * (len(data.tokens) // BATCH)
    generator = torch.Generator().manual_seed(seed)
    columns = (
        TextColumn("step {task.completed}/{task.total}, loss {task.fields[loss]:.3f}"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=steps, loss=math.nan)
        for step in range(steps):
            if step % (len(data.tokens) // BATCH) == 0:
                order = torch.randperm(len(data.tokens), generator=generator).split(BATCH)
            for group in optimiser.param_groups:
                group["lr"] = PEAK_RATE * min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            chosen = order[step % (len(data.tokens) // BATCH)]
            value = loss(heads, data.tokens[chosen], data.states[chosen].float(), rows, num_heads)
            optimiser.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimiser.step()
            progress.update(task, advance=1, loss=value.item())


def loss(heads: nn.Module, tokens: Tensor, states: Tensor, rows: Tensor, num_heads: int) -> Tensor:
    """Return the mean cross-entropy of all heads against the target's probabilities over the draft vocabulary.

    Head h at state t is compared with the target's probabilities after token t + 1 + h. Its weight is HEAD_WEIGHT**h.
    """
    probs = torch.softmax(states @ rows.T, -1)
    total, length = torch.zeros(()), tokens.shape[1]
    for head in range(num_heads):
        count = length - 1 - head
        logits = heads(states[:, :count], tokens[:, 1 : 1 + count + head], head)
        total = total + HEAD_WEIGHT**head * F.cross_entropy(logits.flatten(0, 1), probs[:, 1 + head :].flatten(0, 1))
    return total / sum(HEAD_WEIGHT**head for head in range(num_heads))


def write(out: Path, heads: nn.Module, token_map: Tensor, target: str, config: Mapping[str, object]) -> None:
    """Write weights in bfloat16, the map from draft to target vocabulary and a config.json to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in heads.state_dict().items()}
    save_file({**tensors, "token_map": token_map}, out / "model.safetensors")
    sizes = json.loads(Path(target, "config.json").read_text())
    shared = {"hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocab_size"], "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps({**config, **shared}, indent=1) + "\n")
