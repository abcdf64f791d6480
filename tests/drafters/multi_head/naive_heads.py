"""Medusa and Hydra the obvious way: one node at a time, transformers' own Llama as prefix layer. For comparison."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaModel

from eyas.protocol.commit import NoiseKey
from tests.support import reference
from tests.support.tiny_medusa_hydra import tensors_of

PREFIX = "prefix_embeding_layer."


@dataclass(frozen=True)
class Guess:
    """Tokens below the root, and their cumulative score."""

    path: tuple[int, ...]
    score: float


class NaiveHeads:
    """Weights in the authors' layout."""

    def __init__(self, kind: str, target: str, layers: int = 2) -> None:
        self.kind, self.layers, self.w = kind, layers, tensors_of(kind, layers=layers)
        self.embedding = load_file(Path(target, "model.safetensors"))["model.embed_tokens.weight"]
        if kind == "hydra-prefix":
            config = AutoConfig.from_pretrained(target, num_hidden_layers=1)
            self.prefix = LlamaModel(config).eval()
            inner = {name.removeprefix(PREFIX): t for name, t in self.w.items() if name.startswith(PREFIX)}
            self.prefix.load_state_dict(inner)

    @torch.no_grad()
    def state(self, features: torch.Tensor) -> torch.Tensor:
        """Input state of the heads, from all features [n, H]."""
        if self.kind != "hydra-prefix":
            return features[-1]
        return self.prefix(inputs_embeds=features[None]).last_hidden_state[0, -1]

    def logits(self, state: torch.Tensor, root: int, path: tuple[int, ...]) -> torch.Tensor:
        """Logits of the token after `path`."""
        head = len(path)
        if self.kind == "medusa":
            for layer in range(self.layers):
                state = state + F.silu(self._linear(f"{head}.{layer}.linear", state))
            return self.w[f"{head}.{self.layers}.weight"] @ state
        step, first = (2, 1) if self.kind == "hydra-prefix" else (1, 0)
        x = torch.cat([state, *self.embedding[[root, *path]]])
        block = f"hydra_mlp.{head}.{first}"
        x = self._linear(f"{block}.res_connection", x) + F.silu(self._linear(f"{block}.linear", x))
        for layer in range(1, self.layers):
            x = x + F.silu(self._linear(f"hydra_mlp.{head}.{first + step * layer}.linear", x))
        return self._linear(f"hydra_lm_head.{head}" + (".1" if first else ""), x)

    def scores(self, logits: torch.Tensor, noise: NoiseKey, position: int) -> list[float]:
        """Log-scores of the token at an absolute position."""
        return reference.draft_scores(logits, noise, position, range(len(logits)))

    def guesses(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, paths: list[tuple[int, ...]]
    ) -> dict[tuple[int, ...], Guess]:
        """Tokens and scores of the nodes that the rank paths name, shallow ones first."""
        state, guessed = self.state(features), {(): Guess((), 0.0)}
        for ranks in sorted(paths, key=lambda path: (len(path), path)):
            above = guessed[ranks[:-1]]
            scores = self.scores(self.logits(state, tokens[-1], above.path), noise, len(tokens) + len(above.path))
            best = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[ranks[-1]]
            guessed[ranks] = Guess((*above.path, best), above.score + scores[best])
        del guessed[()]
        return guessed

    def static(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, paths: list[tuple[int, ...]]
    ) -> dict[tuple[int, ...], float]:
        """Possible token paths below the root and their cumulative scores, in the order of the rank paths."""
        guessed = self.guesses(tokens, features, noise, paths).values()
        return {guess.path: guess.score for guess in guessed if guess.score > -math.inf}

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])
