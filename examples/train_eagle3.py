"""Train an EAGLE-3 head (Li et al. 2025) for a target: `python examples/train_eagle3.py TEXT OUT`, TEXT from target_text.py.

Row i reads the feature at i and token i + 1, and learns the target's prediction of token i + 2. On every further unrolled
step its feature is the head's own state at i - 1. Training starts from another EAGLE-3 head; its vocabulary and its
auxiliary layers may change.

Legend: B windows, L tokens, H width, T auxiliary layers, V vocabulary, J KV heads, G query heads of each, D head width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track
from safetensors.torch import load_file
from target_text import DEMO, read_text
from torch import Tensor, nn

from eyas.models.checkpoint import read_target_config, resolve
from eyas.models.heads.eagle import write_head
from eyas.models.heads.eagle_config import EagleHeadConfig, read_head_config

BATCH = 8
STEP_WEIGHT = 0.85
LAYER = "midlayer."

# Keys and values of every unrolled step, [B, L, J, D] each.
Seen = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Example:
    """tokens int64 [B, L]; hidden_states [B, L, T * H]; probs [B, L, V]: the target's prediction after each token."""

    tokens: Tensor
    hidden_states: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Options:
    """unroll: number of training-time-test steps. rate: peak learning rate."""

    minutes: float
    rate: float
    unroll: int


class Head(nn.Module):
    """EAGLE-3 over whole windows; tensors have their published names."""

    def __init__(self, config: EagleHeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.names = [name for name in tensors if name not in ("d2t", "t2d")]
        self.weights = nn.ParameterList(nn.Parameter(tensors[name].float()) for name in self.names)
        self.embedding = embedding

    def forward(self, example: Example, unroll: int) -> Tensor:
        """Return the mean cross-entropy against the target's probabilities; step s has the weight STEP_WEIGHT**s."""
        w = dict(zip(self.names, self.weights, strict=True))
        tokens, probs = example.tokens[:, 1:-1], example.probs[:, 1:-1]
        embedded = self._norm(self.embedding[tokens], w[f"{LAYER}input_layernorm.weight"])
        features = F.linear(example.hidden_states[:, :-2], w["fc.weight"])
        total, seen = torch.zeros(()), Seen()
        for step in range(unroll):
            states = self._layer(w, embedded, features, seen)
            logits = F.linear(self._norm(states, w["norm.weight"]), w["lm_head.weight"])
            valid = slice(step, None)  # earlier rows have no state of `step` steps ago
            value = F.cross_entropy(logits[:, valid].flatten(0, 1).float(), probs[:, valid].flatten(0, 1))
            total = total + STEP_WEIGHT**step * value
            features = F.pad(states[:, :-1], (0, 0, 1, 0))
        return total / sum(STEP_WEIGHT**step for step in range(unroll))

    def _layer(self, w: Mapping[str, Tensor], embedded: Tensor, features: Tensor, seen: Seen) -> Tensor:
        """Return states [B, L, H]; append this step's keys and values to `seen`."""
        c = self.config
        joined = torch.cat([embedded, self._norm(features, w[f"{LAYER}hidden_norm.weight"])], -1)
        projections = (F.linear(joined, w[f"{LAYER}self_attn.{name}_proj.weight"]) for name in "qkv")
        q, k, v = (rows.unflatten(-1, (-1, c.head_dim)) for rows in projections)
        q, k = self._rotate(q), self._rotate(k)
        seen.append((k, v))
        state = features + F.linear(self._attend(q, seen).flatten(-2), w[f"{LAYER}self_attn.o_proj.weight"])
        normed = self._norm(state, w[f"{LAYER}post_attention_layernorm.weight"])
        gate, up = (F.linear(normed, w[f"{LAYER}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return state + F.linear(F.silu(gate) * up, w[f"{LAYER}mlp.down_proj.weight"])

    def _attend(self, query: Tensor, seen: Seen) -> Tensor:
        """Row i attends to its ancestors: rows 0..i - step of step 0, and row i - (step - j) of each later step j."""
        c, step = self.config, len(seen) - 1
        q = query.unflatten(2, (c.num_kv_heads, -1)) * c.head_dim**-0.5
        length = q.shape[1]
        scores = torch.einsum("bljgd,bmjd->bjglm", q, seen[0][0]).float()
        rows = torch.arange(length)
        scores = scores.masked_fill(rows[None] > rows[:, None] - step, -math.inf)
        behind = [(_shift(k, step - j), _shift(v, step - j)) for j, (k, v) in enumerate(seen) if j]
        own = [torch.einsum("bljgd,bljd->bjgl", q, k).float()[..., None] for k, _ in behind]
        weights = torch.softmax(torch.cat([scores, *own], -1).nan_to_num(neginf=-1e9), -1).to(q.dtype)
        out = torch.einsum("bjglm,bmjd->bljgd", weights[..., :length], seen[0][1])
        for j, (_, v) in enumerate(behind):
            out = out + torch.einsum("bjgl,bljd->bljgd", weights[..., length + j], v)
        return out.flatten(2, 3)

    def _rotate(self, x: Tensor) -> Tensor:
        c = self.config
        frequencies = c.rotary["rope_theta"] ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = (torch.arange(x.shape[1])[:, None] * frequencies).repeat(1, 2)[:, None]
        left, right = x.chunk(2, -1)
        return (x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()).to(x.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.config.rms_norm_eps)


def _shift(x: Tensor, rows: int) -> Tensor:
    return F.pad(x[:, : x.shape[1] - rows], (0, 0, 0, 0, rows, 0)) if rows else x


@torch.inference_mode()
def aux_hidden_states(target: str, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return the inputs of the target's layers `layers`, concatenated, bfloat16 [N, L, T * H]."""
    from transformers import AutoModelForCausalLM

    decoder: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval().get_decoder()
    kept: dict[int, Tensor] = {}
    for layer in layers:
        module = decoder.layers[layer] if layer < len(decoder.layers) else decoder.norm
        module.register_forward_pre_hook(lambda module, args, layer=layer: kept.__setitem__(layer, args[0]))
    parts = []
    for part in track(tokens.split(32), description="target's states"):
        decoder(part)
        parts.append(torch.cat([kept[layer] for layer in layers], -1))
    return torch.cat(parts)


def widened(tensors: Mapping[str, Tensor], lm_head: Tensor) -> dict[str, Tensor]:
    """Return the head's tensors with an output layer over the target's whole vocabulary; missing rows are the target's."""
    if "d2t" not in tensors:
        return dict(tensors)
    rows = lm_head.clone()
    rows[torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = tensors["lm_head.weight"].float()
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return {**kept, "lm_head.weight": rows}


def train(head: Head, examples: Any, count: int, options: Options) -> None:
    """Train for `minutes` with AdamW; the learning rate warms up over 50 steps and falls to zero by a cosine."""
    optimiser = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    began, budget, step = time.monotonic(), options.minutes * 60, 0
    columns = (TextColumn("step {task.fields[step]}, loss {task.fields[loss]:.3f}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=budget, loss=math.nan, step=0)
        while (spent := time.monotonic() - began) < budget:
            for group in optimiser.param_groups:
                group["lr"] = options.rate * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * spent / budget))
            with torch.autocast("cpu", torch.bfloat16):
                value = head(examples(torch.randint(count, (BATCH,))), options.unroll)
            optimiser.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimiser.step()
            step += 1
            progress.update(task, completed=spent, loss=value.item(), step=step)


def main(
    text: Path,
    out: Path,
    model: Annotated[str, typer.Option(help="Folder of the target.")] = str(DEMO / "target"),
    draft_model: Annotated[Path, typer.Option(help="EAGLE-3 head to start from.")] = DEMO / "eagle3",
    aux_hidden_state_layers: Annotated[str, typer.Option(help="Layers of the target whose inputs are features.")] = "2,6,12",
    unroll: Annotated[int, typer.Option(help="Training-time-test steps: the head reads its own states.")] = 5,
    minutes: Annotated[float, typer.Option()] = 30.0,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train on TEXT and write a head over the target's whole vocabulary to the folder OUT."""
    torch.manual_seed(seed)
    data, sizes = read_text(text), read_target_config(resolve(model))
    old, weights = read_head_config(draft_model, sizes), load_file(Path(model, "model.safetensors"))
    layers = tuple(map(int, aux_hidden_state_layers.split(",")))
    if len(layers) != len(old.aux_hidden_state_layers):
        num_layers = len(old.aux_hidden_state_layers)
        raise typer.BadParameter(
            f"{draft_model} reads {num_layers} layers, --aux-hidden-state-layers has {len(layers)}; name as many"
        )
    wiring = replace(old.wiring, aux_hidden_state_layers=layers)
    config = replace(old, draft_vocab_size=old.vocab_size, wiring=wiring)
    lm_head = weights["lm_head.weight"].float()
    first = widened(load_file(draft_model / "model.safetensors"), lm_head)
    head = Head(config, first, weights["model.embed_tokens.weight"].float())
    states = aux_hidden_states(model, data.tokens, config.aux_hidden_state_layers)

    def examples(chosen: Tensor) -> Example:
        probs = torch.softmax(data.states[chosen].float() @ lm_head.T, -1)
        return Example(data.tokens[chosen], states[chosen].float(), probs)

    train(head, examples, len(data.tokens), Options(minutes, rate, unroll))
    trained = {name: weight.detach().bfloat16() for name, weight in zip(head.names, head.weights, strict=True)}
    write_head(out, config, trained)


if __name__ == "__main__":
    typer.run(main)
