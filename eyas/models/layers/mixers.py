"""Lets the layers of transformers that mix rows work over slots and pools of states."""

from __future__ import annotations

from typing import Any

from torch import nn

from eyas.models.layers.indexed import leave_out_indexers
from eyas.models.layers.latent import use_latents
from eyas.models.layers.recurrent import use_states


def use_pools(model: nn.Module) -> Any:
    """Let latent attention keep latents in slots, without indexers, and recurrent layers take their states from pools.

    Returns the model. Raises CheckpointError as `use_latents`.
    """
    return use_states(use_latents(leave_out_indexers(model)))
