"""Attention with an indexer, which chooses the keys of each row (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

It keeps the `index_topk` likeliest of the visible keys. In a context of no more tokens it keeps all, and attention is dense.
Eyas serves such contexts alone: `context_limit` ends them there. So indexers have nothing to do, and are left out.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from eyas.config.target_limits import num_chosen_keys

INDEXER = "indexer"
# The method of GLM-5.3 that makes a mask of the chosen keys.
MASK_MAKER = "build_attention_mask_from_topk"
TENSOR_OF_INDEXER = re.compile(rf"\.self_attn\.{INDEXER}\.")


class NoIndexer(nn.Module):
    """Substitute for an indexer. Without weights, it chooses nothing, and attention takes all keys."""

    def forward(self, *_: Any, **__: Any) -> None:
        """Return no choice, as layers hand it to attention and to layers that share it."""


def leave_out_indexers(model: nn.Module) -> Any:
    """Take the indexer of every attention layer out. Returns the model.

    Layers that would take the choice of an earlier layer get a `NoIndexer` too, as they ask for one or the other.
    """
    for module in list(model.modules()):
        if hasattr(module, INDEXER) and _has_latents(module):
            if not isinstance(module.indexer, NoIndexer):
                module.indexer = NoIndexer()
            module.register_forward_pre_hook(_with_mask, with_kwargs=True)
            if hasattr(module, MASK_MAKER):
                setattr(module, MASK_MAKER, _no_mask)
    return model


@contextmanager
def without_indexers(config: Any) -> Iterator[None]:
    """Make attention layers of this thread, inside the context, without their indexers, whose weights are then not read.

    config: of the model. Without indexers nothing happens: torch runs the hook for the modules of all threads.
    """
    if not num_chosen_keys(config):
        yield
        return
    own = threading.get_ident()

    def leave_out(module: nn.Module, name: str, submodule: nn.Module) -> nn.Module | None:
        is_ours = name == INDEXER and _has_latents(module) and threading.get_ident() == own
        return NoIndexer() if is_ours else None

    registration = register_module_module_registration_hook(leave_out)  # type: ignore[arg-type]  # what it returns is taken
    try:
        yield
    finally:
        registration.remove()


def not_of_indexers(names: Iterable[str]) -> list[str]:
    """Return the names of tensors that are of no indexer."""
    return [name for name in names if not TENSOR_OF_INDEXER.search(name)]


def _has_latents(module: nn.Module) -> bool:
    return callable(getattr(module, "expand_kv", None))


def _no_mask(**_: Any) -> None:
    """Take the place of a method that makes a mask of the chosen keys."""


def _with_mask(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a layer a mask to cut out what an indexer is given of it. Neither of them is read."""
    mask = named.get("attention_mask")
    return args, {**named, "attention_mask": torch.empty(1, 1, 1, 1) if mask is None else mask}
