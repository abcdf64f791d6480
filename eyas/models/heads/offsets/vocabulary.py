"""The vocabulary of heads, and whether it is the target's: a checkpoint's tensors in, target ids of draft ids out.

Legend: D draft vocabulary, V target vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import CheckpointError


def check_target(tensors: Mapping[str, Tensor], hidden: int, vocab_size: int, source: Path) -> None:
    """Raises CheckpointError for heads of another target, as far as their output layers tell."""
    for output in (tensor for name, tensor in tensors.items() if "lm_head" in name and tensor.dim() == 2):
        rows = vocab_size if "token_map" in tensors else len(output)
        for what, mine, its in (("hidden size", output.shape[1], hidden), ("vocabulary size", rows, vocab_size)):
            if mine != its:
                raise CheckpointError(f"{source} was made for a target of {what} {mine}, but this target has {its}")


def draft_ids(tensors: dict[str, Tensor], vocab_size: int, source: Path) -> Tensor:
    """Take `token_map` out of `tensors` and cut output layers of the whole vocabulary to it; int64 [D].

    Without a map draft ids are target ids. Raises CheckpointError for a map that is none.
    """
    mapped = tensors.pop("token_map", None)
    if mapped is None:
        return torch.arange(vocab_size)
    ids = mapped.long()
    if ids.dim() != 1 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{source}: token_map does not map draft ids to distinct target ids below {vocab_size}")
    for name, tensor in tensors.items():
        if "lm_head" in name and len(tensor) == vocab_size:
            tensors[name] = tensor[ids]
    return ids
