"""Packed linear layers against torch's own, over sizes on both sides of where packing is worth its call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eyas.models.cpu.linear import WORTH_PACKED, PackedLinear, pack_weights

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


@pytest.mark.parametrize("sizes", [(32, 48), (256, 512), (256, 4096), (7, 3)])
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "biased"])
def test_packed_layers_give_what_they_gave_before(sizes: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, bias=bias)
    rows = [torch.randn(*shape, sizes[0]) for shape in ((1,), (2,), (1, 9), (1, 64), (3, 5), (0,), (1, 0))]
    expected = [layer(x).detach() for x in rows]
    pack_weights(layer)
    assert isinstance(layer, PackedLinear)
    with torch.inference_mode():
        for x, before in zip(rows, expected, strict=True):
            torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-5)


def test_only_large_weights_give_up_their_own_layout() -> None:
    small, large = nn.Linear(64, 64, bias=False), nn.Linear(1024, WORTH_PACKED // 1024 + 1, bias=False)
    pack_weights(nn.ModuleList([small, large]))
    assert small.weight is not None
    assert large.weight is None


def test_many_rows_go_through_the_packed_weight_and_few_do_not() -> None:
    """Seen by emptying the one that must not be read."""
    layer = nn.Linear(64, 64, bias=False)
    few, many = torch.ones(1, 64), torch.ones(WORTH_PACKED // 64**2 + 1, 64)
    pack_weights(layer)
    before = layer(few)
    nn.init.zeros_(layer.weight)
    assert layer(few).eq(0).all()
    torch.testing.assert_close(layer(many)[:1], before, rtol=1e-4, atol=1e-5)


def test_layers_that_are_no_float32_linear_stay() -> None:
    class Odd(nn.Linear):
        """A linear layer with an arithmetic of its own."""

    layers = nn.ModuleList([nn.Linear(8, 8).bfloat16(), Odd(8, 8), nn.Conv1d(1, 1, 1)])
    kinds = [type(layer) for layer in layers]
    pack_weights(layers)
    assert [type(layer) for layer in layers] == kinds
