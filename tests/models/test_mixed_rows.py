"""A model whose rows depend on others than attention shows them is refused: its last layer mixes rows after attention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from eyas.errors import CheckpointError
from eyas.models.loading import load_target
from tests.support.families import config_of, write_model
from tests.support.tiers import nightly, tiered

LAST = 2


def shifted(states: Tensor, positions: Tensor) -> Tensor:
    """A convolution over a row and the one before it."""
    return states + torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))


def recurrent(states: Tensor, positions: Tensor) -> Tensor:
    """A recurrence that knows where sequences begin, and keeps no state from pass to pass."""
    rows = [states[:, 0]]
    for row in range(1, states.shape[1]):
        rows.append(states[:, row] + rows[-1] * (0.5 if positions[0, row] else 0.0))
    return torch.stack(rows, 1)


def segmented(states: Tensor, positions: Tensor) -> Tensor:
    """A recurrence that also starts over where positions do not follow one another."""
    rows = [states[:, 0]]
    for row in range(1, states.shape[1]):
        rows.append(states[:, row] + rows[-1] * (0.5 if positions[0, row] == positions[0, row - 1] + 1 else 0.0))
    return torch.stack(rows, 1)


MIXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda states, _: states + 2 * states.mean(1, keepdim=True),
    "faint mean": lambda states, _: states + 0.1 * states.mean(1, keepdim=True),
    "largest": lambda states, _: states + states.amax(1, keepdim=True),
    "convolution": shifted,
    "running sum": lambda states, _: states.cumsum(1),
    "recurrence": recurrent,
    "recurrence of each segment": segmented,
    "number of rows": lambda states, _: states.clone().index_add_(2, torch.tensor([0]), states[..., :1] * states.shape[1]),
}


def mix_rows(monkeypatch: pytest.MonkeyPatch, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    plain = LlamaDecoderLayer.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, position_ids: Tensor, **named: Any) -> Tensor:
        states = plain(self, hidden_states, *args, position_ids=position_ids, **named)
        return mix(states, position_ids) if self.self_attn.layer_idx == LAST else states

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)


@pytest.mark.parametrize("mix", tiered(MIXES, ("faint mean", "convolution", "recurrence of each segment")))
@pytest.mark.parametrize("dtype", [nightly("float32"), "bfloat16"])
def test_layers_that_mix_rows_are_refused(mix: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, config_of("llama"))
    mix_rows(monkeypatch, MIXES[mix])
    with pytest.raises(CheckpointError, match="mixes rows outside attention, as pooling and unknown recurrences do"):
        load_target(folder, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_change_each_row_alone_are_served(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, config_of("llama"))
    mix_rows(monkeypatch, lambda states, positions: states * (1 + positions[..., None] % 3))
    load_target(folder, dtype)
