"""Brings the keyword arguments of a model's forward pass to attention modules whose layers do not pass them on."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def relay_arguments(model: nn.Module, names: tuple[str, ...]) -> None:
    """Let every module with the number of a layer get these arguments of the model's forward pass, unless it has them.

    They are kept for the time of a pass, also of one that raises. One thread at a time may run the model: the one that runs
    the target's passes.
    """
    given: dict[str, Any] = {}

    def take(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given.update({name: named[name] for name in names if name in named})

    def add(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**given, **named}

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: given.clear(), always_call=True)
    for module in model.modules():
        if hasattr(module, "layer_idx") and _takes_any(module):
            module.register_forward_pre_hook(add, with_kwargs=True)


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
