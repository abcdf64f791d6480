"""Modules for multi-token prediction and their trees, the obvious way: whole sequences through transformers' own layers."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from eyas.config import TreeConfig
from eyas.protocol.commit import NoiseKey
from tests.support.naive_eagle import NaiveEagle, Node
from tests.support.reference import whole_class
from tests.support.tiny_mtp import FAMILIES, LAYERS, configs, of_module


class NaiveMtp(NaiveEagle):
    """The last layers of a model that has more than the target, behind norms and projections that are written out.

    num_true: pairs of committed tokens; those behind them are of a path.
    """

    num_true = 0

    def __init__(self, folder: str, family: str, output: str = "normed", count: int = 1) -> None:
        of = FAMILIES[family]
        (_, config) = configs(FAMILIES[family], count)
        stored = load_file(Path(folder, "model.safetensors"))
        config._attn_implementation = "eager"
        model = whole_class(config).from_config(config, dtype=torch.float32)
        own = dict[str, torch.Tensor]()
        for name, tensor in stored.items():
            number = next((n for n in range(count) if name.startswith(f"{of_module(of.layer, n)}.")), None)
            layer = "" if number is None else f"{of_module(of.layer, number)}."
            if layer and of.has_layers:
                depth, rest = name.removeprefix(layer).split(".", 1)
                own[f"model.layers.{LAYERS + int(depth)}.{rest}"] = tensor
                continue
            own[name.replace(layer, f"model.layers.{LAYERS + (number or 0)}.") if layer else name] = tensor
        self.model = type(model).from_pretrained(None, config=config, state_dict=own, attn_implementation="eager").eval()
        self.parts = [[stored[of_module(name, number)] for name in of.names] for number in range(count)]
        self.kind = (getattr(config, "layer_types", None) or [None] * (LAYERS + 1))[LAYERS]
        self.window = config.sliding_window if self.kind == "sliding_attention" else None
        self.eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.adds_one = of.adds_one
        self.has_layers = of.has_layers
        self.output = output
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.ids = list(range(len(self.embedding)))

    @property
    def lm_head(self) -> torch.Tensor:
        return self.model.lm_head.weight.detach()

    def candidates(
        self, tokens: list[int], features: torch.Tensor, noise: NoiseKey, shape: TreeConfig, scale: float = 1.0
    ) -> list[Node]:
        self.num_true = len(tokens) - 1
        return super().candidates(tokens, features, noise, shape, scale)

    def state(self, pairs: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """The state of the module that predicts what follows the pairs, of the last one beyond all modules."""
        tokens = [token for _, token in pairs]
        last = len(self.parts) - 1
        inputs = states = torch.stack([feature for feature, _ in pairs[: self.num_true]])
        depth = len(pairs) - self.num_true
        for module in range(min(depth, last) + 1):
            inputs, states = states, self.run(module, states, tokens[module : module + self.num_true])
        for more in range(1, depth - last + 1):
            inputs = torch.cat([inputs, states[-1:]])
            states = self.run(last, inputs, tokens[last : last + self.num_true + more])
        return states[-1]

    @torch.no_grad()
    def run(self, module: int, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """A module's states for all rows; row i has position i."""
        projection, enorm, hnorm, final = self.parts[module]
        x = torch.cat([self.norm(self.embedding[tokens], enorm), self.norm(features, hnorm)], -1) @ projection.T
        rows = torch.arange(len(tokens))
        seen = rows <= rows[:, None]
        if self.window is not None:
            seen = seen & (rows[:, None] - rows < self.window)
        mask = torch.zeros(len(rows), len(rows)).masked_fill(~seen, float("-inf"))[None, None]
        layers = (
            self.model.model.layers[LAYERS + module :] if self.has_layers else [self.model.model.layers[LAYERS + module]]
        )
        named = {"attention_mask": mask, "position_ids": rows[None]}
        if rotary := getattr(self.model.model, "rotary_emb", None):
            kinds = [self.kind] if isinstance(rotary.rope_type, dict) else []
            named["position_embeddings"] = rotary(x[None], rows[None], *kinds)
        states = x
        for layer in layers if self.has_layers else layers[:1]:
            found = layer(states[None], **named)
            states = (found if isinstance(found, torch.Tensor) else found[0])[0]
        return self.norm(states, final) if self.output == "normed" else states

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Only one module has states that are not normed yet."""
        return (self.norm(state, self.parts[0][-1]) if self.output == "state" else state) @ self.lm_head.T

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * (weight + self.adds_one)
