"""Collects the hidden states of some layers of a target, which draft heads read."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from eyas.errors import CheckpointError

# Dimensions of hidden states: batch, rows, width.
ROWS_OF_BATCH = 3


# Names of the final norm of a decoder; most have the first.
FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")


def final_norm(decoder: Any) -> Any:
    """Return the norm behind the layers of a decoder; None if it has none by a known name."""
    return next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)


class StateHooks:
    """Hooks on the layers of a model that collect their inputs. Targets that share a model share its hooks.

    layers: which, see TargetModel. states: what is collected [N, R, C], by layer.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._handles = model, list[RemovableHandle]()
        self.layers: tuple[int, ...] = ()
        self.states: dict[int, Tensor] = {}

    def use(self, layers: tuple[int, ...]) -> None:
        """Collect the states of these layers, and of no others, from now on."""
        for handle in self._handles:
            handle.remove()
        self.layers, self._handles = layers, [self._collect(layer) for layer in dict.fromkeys(layers)]

    def _collect(self, layer: int) -> RemovableHandle:
        decoder: Any = self._model.get_decoder()

        def keep(states: Tensor) -> None:
            if states.ndim != ROWS_OF_BATCH:
                raise CheckpointError(
                    f"the draft head reads the hidden state of layer {layer}, but {type(decoder).__name__} has several of "
                    "each token; take a draft model or lookups, or another target"
                )
            self.states[layer] = states

        if layer < 0:  # FINAL_NORM_OUTPUT
            return final_norm(decoder).register_forward_hook(lambda module, args, output: keep(output))  # type: ignore[no-any-return]
        module = decoder.layers[layer] if layer < len(decoder.layers) else final_norm(decoder)
        return module.register_forward_pre_hook(lambda module, args: keep(args[0]))  # type: ignore[no-any-return]


# As an aux hidden state layer: the state behind the target's final norm.
FINAL_NORM_OUTPUT = -1
