"""Block heads and P-EAGLE, the obvious way: the whole context again for each node, no KV, no batch. For comparison."""

import math

import torch
import torch.nn.functional as F

from eyas.config import TreeConfig
from eyas.models.heads.block_config import BlockHeadConfig
from eyas.protocol.commit import NoiseKey
from tests.support.naive_eagle import NaiveEagle, Node, linear, rms, split

Pairs = list[tuple[torch.Tensor, int]]


class NaiveBlock(NaiveEagle):
    """Weights under their published names. A node's state is the logits of its children."""

    def __init__(
        self, config: BlockHeadConfig, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, lm_head: torch.Tensor
    ) -> None:
        super().__init__({"lm_head.weight": lm_head} | tensors, embedding, config.num_heads, config.num_kv_heads)
        self.c = config
        self.last: tuple[tuple[int, torch.Tensor], torch.Tensor] | None = None

    def candidates(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, shape: TreeConfig, scale: float = 1.0
    ) -> list[Node]:
        self.num_context = len(features)
        return super().candidates(tokens, features, noise, shape, scale)

    def state(self, pairs: Pairs) -> torch.Tensor:
        context = torch.stack([feature for feature, _ in pairs[: self.num_context]])
        path = [token for _, token in pairs[self.num_context - 1 :]]
        if len(path) > self.c.num_drafted:
            return torch.zeros(len(self.lm_head))
        key = (path[0], context)
        if self.last is None or self.last[0][0] != key[0] or not torch.equal(self.last[0][1], context):
            self.last = (key, self.block(context, path[0]))
        return self.path_logits(self.last[1], path)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def block(self, context: torch.Tensor, anchor: int) -> torch.Tensor:
        """Normed states of the rows that propose tokens."""
        states = self.rows(context, [anchor, *[self.c.mask_token_id] * (self.c.block_size - 1)])
        return states[0 if self.c.wiring.sample_from_anchor else 1 :]

    def rows(self, context: torch.Tensor, tokens: list[int], num_causal: int = 0) -> torch.Tensor:
        """Normed states of rows behind the context. num_causal: of the first ones, which see no row behind themselves."""
        c, length = self.c, len(context)
        states = self.embedding[tokens]
        for layer in range(c.num_layers):
            name = f"layers.{layer}."
            rows, kernel = self.convolved(f"{name}attention_conv", rms(states, self.w[f"{name}input_layernorm.weight"]))
            q = rms(
                split(linear(rows, self.w, f"{name}self_attn.q_proj"), self.heads), self.w[f"{name}self_attn.q_norm.weight"]
            )
            k, v = (
                split(torch.cat([linear(x, self.w, f"{name}self_attn.{p}_proj") for x in (context, rows)]), self.kv_heads)
                for p in "kv"
            )
            k = turned(rms(k, self.w[f"{name}self_attn.k_norm.weight"]), 0)
            attended = self.attended(turned(q, length), k, v, c.windows[layer], num_causal)
            rows = linear(attended, self.w, f"{name}self_attn.o_proj")
            states = states + self.convolve(f"{name}attention_conv", 1, rows, kernel)
            rows, kernel = self.convolved(f"{name}mlp_conv", rms(states, self.w[f"{name}post_attention_layernorm.weight"]))
            gate, up = (linear(rows, self.w, f"{name}mlp.{p}_proj") for p in ("gate", "up"))
            rows = linear(F.silu(gate) * up, self.w, f"{name}mlp.down_proj")
            states = states + self.convolve(f"{name}mlp_conv", 1, rows, kernel)
        return rms(states, self.w["norm.weight"])

    def attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, num_causal: int = 0
    ) -> torch.Tensor:
        rows = []
        for row in range(len(q)):
            at, outputs = len(k) - len(q) + row, []
            visible = [
                key for key in range(len(k))
                if (window is None or (at - key < window and (key <= at or not self.c.causal_windows)))
                and (key <= at or row >= num_causal)
            ]  # fmt: skip
            for head in range(self.heads):
                kv = head // (self.heads // self.kv_heads)
                weights = torch.softmax(k[visible, kv] @ q[row, head] / math.sqrt(q.shape[-1]), 0)
                outputs.append(weights @ v[visible, kv])
            rows.append(torch.cat(outputs))
        return torch.stack(rows)

    def convolved(self, name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if f"{name}.base_kernel" not in self.w:
            return rows, None
        kernel = linear(rows, self.w, f"{name}.kernel_projection").view(len(rows), 2, self.c.conv_kernel, -1)
        return self.convolve(name, 0, rows, kernel), kernel

    def convolve(self, name: str, side: int, rows: torch.Tensor, kernel: torch.Tensor | None) -> torch.Tensor:
        if kernel is None:
            return rows
        out = torch.zeros_like(rows)
        for row in range(len(rows)):
            for tap in range(min(row + 1, self.c.conv_kernel)):
                for column in range(rows.shape[1]):
                    factor = (
                        self.w[f"{name}.base_kernel"][side, tap, column]
                        + kernel[row, side, tap, column // self.c.conv_group]
                    )
                    out[row, column] += factor * rows[row - tap, column]
        return out

    def path_logits(self, states: torch.Tensor, path: list[int]) -> torch.Tensor:
        """Logits behind the tokens of a path, whose first one is the anchor."""
        logits, h, token = states[len(path) - 1] @ self.lm_head.T, states[len(path) - 1], path[-1]
        if self.c.selector_rank:
            books = [self.w[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor")]
            kept = logits.topk(self.c.selector_top_k).indices
            context = books[0][token] * linear(h, self.w, "candidate_selector.hidden_projection")
            return torch.full_like(logits, -math.inf).scatter(0, kept, logits[kept] + books[1][kept] @ context)
        if not self.c.markov_rank:
            return logits
        embedded, state = self.w["markov_head.markov_w1.weight"], torch.zeros(self.c.markov_rank)
        latent = embedded[token]
        if self.c.markov_kind == "gated":
            latent = torch.sigmoid(linear(torch.cat([h, latent]), self.w, "markov_head.gate_proj")) * latent
        if self.c.markov_kind == "rnn":
            for depth, before in enumerate(path):
                joint = linear(torch.cat([state, embedded[before], states[depth]]), self.w, "markov_head.joint_proj")
                gate, candidate, output = joint.chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                latent = torch.tanh(output)
        return logits + self.w["markov_head.markov_w2.weight"] @ latent


class NaivePEagle(NaiveEagle):
    """P-EAGLE: behind the last pair come pairs of the mask's feature and the mask token, whatever the path."""

    def mask_pairs(self, count: int) -> Pairs:
        return [(self.w["mask_hidden"].flatten() @ self.w["fc.weight"].T, 2)] * count

    def candidates(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, shape: TreeConfig, scale: float = 1.0
    ) -> list[Node]:
        self.num_context = len(features)
        return super().candidates(tokens, features, noise, shape, scale)

    def state(self, pairs: Pairs) -> torch.Tensor:
        return super().state(pairs[: self.num_context] + self.mask_pairs(len(pairs) - self.num_context))


def turned(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary embedding of rows at positions from `first` on."""
    half = x.shape[-1] // 2
    angles = torch.arange(first, first + len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)
