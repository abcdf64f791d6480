"""EAGLE-3 and its dynamic tree, the obvious way: one node at a time, whole sequences, no KV, no batch. For comparison."""

import math
from dataclasses import dataclass

import torch

from eyas.config import TreeConfig
from eyas.request import NoiseKey, SamplingParams
from tests import reference


@dataclass
class Node:
    """A candidate. path: (token, state) pairs between the committed ones and the node's children. state: the head's state
    from which the node was guessed, and once it is expanded, the one from which its children are."""

    token: int
    parent: int
    depth: int
    score: float
    state: torch.Tensor
    path: list[tuple[int, torch.Tensor]]


class NaiveEagle:
    """Weights in the public layout; attention written out over the whole sequence of pairs."""

    def __init__(self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, heads: int, kv_heads: int) -> None:
        self.w, self.embedding, self.heads, self.kv_heads = tensors, embedding, heads, kv_heads
        self.ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()

    def state(self, pairs: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """The head's state behind the last (feature, token) pair; pair i stands at position i."""
        w, layer = self.w, "midlayer."
        features = torch.stack([feature for feature, _ in pairs])
        embedded = self.embedding[[token for _, token in pairs]]
        both = (embedded, "input_layernorm"), (features, "hidden_norm")
        x = torch.cat([rms(part, w[f"{layer}{norm}.weight"]) for part, norm in both], -1)
        q, k, v = (x @ w[f"{layer}self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = (split(q, self.heads), split(k, self.kv_heads), split(v, self.kv_heads))
        q, k = rotate(q), rotate(k)
        outputs = []
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = torch.softmax(q[-1, head] @ k[:, kv].T / math.sqrt(q.shape[-1]), -1)
            outputs.append(scores @ v[:, kv])
        state = features[-1] + torch.cat(outputs) @ w[layer + "self_attn.o_proj.weight"].T
        normed = rms(state, w[layer + "post_attention_layernorm.weight"])
        gate, up = (normed @ w[f"{layer}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return state + (torch.nn.functional.silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T

    def scores(self, state: torch.Tensor, noise: NoiseKey, position: int, scale: float) -> list[float]:
        """Log-scores over the draft vocabulary of the token at an absolute position."""
        logits = rms(state, self.w["norm.weight"]) @ self.w["lm_head.weight"].T
        if noise.temperature == 0:
            return torch.log_softmax(logits, -1).tolist()
        params = SamplingParams(temperature=noise.temperature, top_k=noise.top_k, top_p=noise.top_p)
        law = reference.law(logits, params)
        gumbel = [-math.log(reference.noise(noise.seed, position, token)) for token in self.ids]
        perturbed = [(math.log(p) + g) / scale if p > 0 else -math.inf for p, g in zip(law, gumbel, strict=True)]
        return torch.log_softmax(torch.tensor(perturbed), -1).tolist()

    def candidates(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, shape: TreeConfig, scale: float = 1.0
    ) -> list[Node]:
        """Every child of every expanded node, by level, then by order of their parents."""
        pairs = list(zip(features, tokens[1:], strict=True))
        root = self.state(pairs)
        nodes: list[Node] = []
        frontier = [Node(tokens[-1], -1, 0, 0.0, root, [])]
        for depth in range(1, shape.depth + 1):
            level = []
            for node in frontier:
                scores = self.scores(node.state, noise, len(tokens) + depth - 1, scale)
                best = sorted(range(len(scores)), key=lambda t: (-scores[t], t))[: shape.width]
                parent = next((i for i, other in enumerate(nodes) if other is node), -1)
                level += [Node(self.ids[b], parent, depth, node.score + scores[b], node.state, node.path) for b in best]
            nodes += level
            frontier = sorted(level, key=lambda node: -node.score)[: shape.width]  # stable: ties keep their order
            for node in frontier:
                node.path = [*node.path, (node.token, node.state)]
                node.state = self.state(pairs + [(state, token) for token, state in node.path])
        return nodes


def best_tree(nodes: list[Node], count: int) -> list[Node]:
    """The `count` best by (score, depth, order), in order."""
    finite = [i for i in range(len(nodes)) if nodes[i].score > -math.inf]
    chosen = sorted(finite, key=lambda i: (-nodes[i].score, nodes[i].depth, i))[:count]
    return [nodes[i] for i in sorted(chosen)]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(len(x), heads, -1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of row i at position i, base 10000."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)
