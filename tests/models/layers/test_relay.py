"""Arguments of a pass reach layers that do not hand them on, and are let go of with the pass."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyas.models.layers.relay import relay_arguments


class Argument:
    """Arguments that a pass gives to its layers, such as a KV cache."""


class Layer(nn.Module):
    layer_idx = 0
    found: Any = None
    error = ""

    def forward(self, states: Tensor, **arguments: Any) -> Tensor:
        self.found = weakref.ref(arguments["kv_cache"])
        if self.error:
            raise RuntimeError(self.error)
        return states


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, states: Tensor, **arguments: Any) -> Any:
        return self.layer(states)


@pytest.mark.parametrize("error", ["", "out of memory"])
def test_arguments_live_as_long_as_their_pass(error: str) -> None:
    model = Model()
    model.layer.error = error
    relay_arguments(model, ("packed", "kv_cache"))
    argument = Argument()
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        model(torch.zeros(1), kv_cache=argument)
    assert model.layer.found() is argument
    del argument
    gc.collect()
    assert model.layer.found() is None
