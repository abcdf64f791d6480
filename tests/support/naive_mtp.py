"""A module for multi-token prediction and its trees, the obvious way: whole sequences through transformers' own layer."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.naive_eagle import NaiveEagle
from tests.support.reference import whole_class
from tests.support.tiny_mtp import FAMILIES, LAYERS, configs


class NaiveMtp(NaiveEagle):
    """The last layer of a model that has one more than the target, behind norms and a projection that are written out."""

    def __init__(self, folder: str, family: str, output: str = "normed") -> None:
        of, (_, config) = FAMILIES[family], configs(FAMILIES[family])
        stored = load_file(Path(folder, "model.safetensors"))
        config._attn_implementation = "eager"
        model = whole_class(config).from_config(config, dtype=torch.float32).eval()
        layer = f"model.layers.{LAYERS}."
        own = {name.replace(f"{of.layer}.", layer): t for name, t in stored.items() if name not in of.names[:3]}
        self.model = type(model).from_pretrained(None, config=config, state_dict=own, attn_implementation="eager").eval()
        self.layer, self.window = self.model.model.layers[LAYERS], None
        if (getattr(config, "layer_types", None) or [""] * 4)[LAYERS] == "sliding_attention":
            self.window = config.sliding_window
        self.kind = (getattr(config, "layer_types", None) or [None] * 4)[LAYERS]
        self.projection, self.enorm, self.hnorm, self.final = (stored[name] for name in of.names)
        self.eps, self.output = config.rms_norm_eps, output
        self.embedding = stored["model.embed_tokens.weight"]
        self.ids = list(range(len(self.embedding)))

    @property
    def lm_head(self) -> torch.Tensor:
        return self.model.lm_head.weight.detach()

    @torch.no_grad()
    def states(self, pairs: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """The module's states after all (feature, token) pairs; pair i has position i."""
        embedded = self.embedding[[token for _, token in pairs]]
        features = torch.stack([feature for feature, _ in pairs])
        x = torch.cat([self.norm(embedded, self.enorm), self.norm(features, self.hnorm)], -1) @ self.projection.T
        rows = torch.arange(len(pairs))
        seen = rows <= rows[:, None]
        if self.window is not None:
            seen = seen & (rows[:, None] - rows < self.window)
        mask = torch.zeros(len(rows), len(rows)).masked_fill(~seen, float("-inf"))[None, None]
        rotary = self.model.model.rotary_emb
        kinds = [self.kind] if isinstance(rotary.rope_type, dict) else []
        tables = rotary(x[None], rows[None], *kinds)
        found = self.layer(x[None], attention_mask=mask, position_ids=rows[None], position_embeddings=tables)
        states = (found if isinstance(found, torch.Tensor) else found[0])[0]
        return self.norm(states, self.final) if self.output == "normed" else states

    def state(self, pairs: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        return self.states(pairs)[-1]

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return (self.norm(state, self.final) if self.output == "state" else state) @ self.lm_head.T

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight
