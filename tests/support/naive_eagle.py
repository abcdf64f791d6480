"""EAGLE heads and their trees, the obvious way: one node at a time, whole sequences, no KV, no batch. For comparison."""

import math
from dataclasses import dataclass

import torch

from eyas.config import TreeConfig
from eyas.protocol.commit import NoiseKey
from tests.support import reference


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
    """EAGLE-3: weights in the public layout; attention written out over the whole sequence of pairs."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, heads: int, kv_heads: int,
        normed_residual: bool = False, output: str = "state", layers: int = 1, base: float = 10000.0,
    ) -> None:  # fmt: skip
        self.w, self.heads, self.kv_heads = tensors, heads, kv_heads
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.normed_residual, self.output, self.layers, self.base = normed_residual, output, layers, base
        count = len(self.lm_head)
        self.ids = (torch.arange(count) + tensors.get("d2t", torch.zeros(count, dtype=torch.int64))).tolist()

    @property
    def lm_head(self) -> torch.Tensor:
        return self.w["lm_head.weight"]

    def enter(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of the first layer's attention for all pairs, and its residual."""
        w = self.w
        hidden = rms(features, w["midlayer.hidden_norm.weight"])
        x = torch.cat([rms(embedded, w["midlayer.input_layernorm.weight"]), hidden], -1)
        return x, hidden if self.normed_residual else features

    def prefix(self, layer: int) -> str:
        return "midlayer." if layer == 0 else f"layers.{layer}."

    def state(self, pairs: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """The head's state after the last (feature, token) pair; pair i has position i."""
        features = torch.stack([feature for feature, _ in pairs])
        x, residual = self.enter(self.embedding[[token for _, token in pairs]], features)
        states = features
        for layer in range(self.layers):
            prefix = self.prefix(layer)
            if layer > 0:
                x, residual = rms(states, self.w[f"{prefix}input_layernorm.weight"]), states
            states = self.finish(prefix, residual + self.attention(prefix, x))
        return rms(states[-1], self.w["norm.weight"]) if self.output == "normed" else states[-1]

    def attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        w = self.w
        q, k, v = (linear(x, w, f"{prefix}self_attn.{p}_proj") for p in "qkv")
        q, k, v = (split(q, self.heads), split(k, self.kv_heads), split(v, self.kv_heads))
        q, k = rotate(q, self.base), rotate(k, self.base)
        outputs = []
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, kv].T / math.sqrt(q.shape[-1])
            later = torch.ones(len(x), len(x)).triu(1).bool()
            outputs.append(torch.softmax(scores.masked_fill(later, -math.inf), -1) @ v[:, kv])
        return linear(torch.cat(outputs, -1), w, f"{prefix}self_attn.o_proj")

    def finish(self, prefix: str, state: torch.Tensor) -> torch.Tensor:
        normed = rms(state, self.w[f"{prefix}post_attention_layernorm.weight"])
        gate, up = (normed @ self.w[f"{prefix}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return state + (torch.nn.functional.silu(gate) * up) @ self.w[f"{prefix}mlp.down_proj.weight"].T

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return (rms(state, self.w["norm.weight"]) if self.output == "state" else state) @ self.lm_head.T

    def scores(self, state: torch.Tensor, noise: NoiseKey, position: int, scale: float) -> list[float]:
        """Log-scores over the draft vocabulary of the token at an absolute position."""
        return reference.draft_scores(self.logits(state), noise, position, self.ids, scale)

    def candidates(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, shape: TreeConfig, scale: float = 1.0
    ) -> list[Node]:
        """Every child of every expanded node, by level, then by order of their parents."""
        pairs = list(zip(features, tokens[1:], strict=True))
        root = self.state(pairs)
        nodes: list[Node] = []
        frontier = [Node(tokens[-1], -1, 0, 0.0, root, [])]
        for depth in range(1, shape.num_steps + 1):
            level = []
            for node in frontier:
                scores = self.scores(node.state, noise, len(tokens) + depth - 1, scale)
                best = sorted(range(len(scores)), key=lambda t: (-scores[t], t))[: shape.top_k]
                parent = next((i for i, other in enumerate(nodes) if other is node), -1)
                level += [Node(self.ids[b], parent, depth, node.score + scores[b], node.state, node.path) for b in best]
            nodes += level
            frontier = sorted(level, key=lambda node: -node.score)[: shape.top_k]  # stable: ties keep their order
            for node in frontier:
                self._expand(node, pairs)
        return nodes

    def static_nodes(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, paths: tuple[tuple[int, ...], ...]
    ) -> list[Node]:
        """The node of every path, by level, then by path."""
        pairs = list(zip(features, tokens[1:], strict=True))
        found = {(): Node(tokens[-1], -1, 0, 0.0, self.state(pairs), [])}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            parent = found[path[:-1]]
            if parent.depth > 0 and len(parent.path) < parent.depth:
                self._expand(parent, pairs)
            scores = self.scores(parent.state, noise, len(tokens) + parent.depth, 1.0)
            child = sorted(range(len(scores)), key=lambda t: (-scores[t], t))[path[-1]]
            score, place = parent.score + scores[child], list(found).index(path[:-1]) - 1
            found[path] = Node(self.ids[child], place, len(path), score, parent.state, parent.path)
        return list(found.values())[1:]

    def _expand(self, node: Node, pairs: list[tuple[torch.Tensor, int]]) -> None:
        node.path = [*node.path, (node.token, node.state)]
        node.state = self.state(pairs + [(state, token) for token, state in node.path])


class NaiveEagle1(NaiveEagle):
    """EAGLE-1 and -2: fc over embedding and feature, no norm before attention or behind the layer, the target's lm_head."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, lm_head: torch.Tensor, heads: int, kv_heads: int
    ) -> None:
        self._target_lm_head = lm_head
        super().__init__(tensors, embedding, heads, kv_heads, output="bare")

    @property
    def lm_head(self) -> torch.Tensor:
        return self._target_lm_head

    def prefix(self, layer: int) -> str:
        return f"layers.{layer}."

    def enter(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = linear(torch.cat([embedded, features], -1), self.w, "fc")
        return x, x


def best_tree(nodes: list[Node], count: int) -> list[Node]:
    """The `count` best by (score, depth, order), in order."""
    finite = [i for i in range(len(nodes)) if nodes[i].score > -math.inf]
    chosen = sorted(finite, key=lambda i: (-nodes[i].score, nodes[i].depth, i))[:count]
    return [nodes[i] for i in sorted(chosen)]


def linear(x: torch.Tensor, w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(1))


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(len(x), heads, -1)


def rotate(x: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Rotary embedding of row i at position i."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)
