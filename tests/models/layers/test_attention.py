"""The attention of a pass over slots, as libraries compute it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.arguments import AttentionRule
from eyas.models.inputs import pack
from eyas.models.layers.attention import attend
from tests.support.devices.random_passes import make_pass


def test_one_segment_takes_results_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's memory-efficient kernel returns the heads of a row side by side."""
    packed = pack(make_pass([(True, 9, 30)]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(40, 2, 16, generator=generator) for _ in "kv")
    query = torch.randn(9, 6, 16, generator=generator)
    expected = attend(query, keys, values, packed, AttentionRule(0.25))
    library = F.scaled_dot_product_attention

    def by_rows(*args: Tensor, **named: Tensor) -> Tensor:
        return library(*args, **named).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", by_rows)
    torch.testing.assert_close(attend(query, keys, values, packed, AttentionRule(0.25)), expected)
