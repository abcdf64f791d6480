"""Packed linear layers against torch's own."""

import pytest
import torch
from torch import nn

from eyas.device.host import has_numba
from eyas.device.processor import converts_halves
from eyas.models.backends.packed_weights import MergedLinearPart, PackedLinear, has_fbgemm, has_kernel, pack_weights

BLOCKS, HALVES = ("float32 blocks", "float16 blocks"), ("fbgemm", "float16 blocks")

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


@pytest.fixture(autouse=True, params=["mkl", "onednn", "fbgemm", "float32 blocks", "float16 blocks"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All layouts, whatever processor this is. New layers have weights of bfloat16 where it is of float16."""
    if request.param == "mkl" and not torch.backends.mkl.is_available():
        pytest.skip("this torch was built without MKL")
    if request.param in HALVES and not has_fbgemm():
        pytest.skip("this torch was built without FBGEMM")
    if request.param in BLOCKS and not (has_numba() and converts_halves()):
        pytest.skip("kernels need numba, and a processor that converts float16")
    monkeypatch.setattr("eyas.models.backends.packed_weights.is_intel", lambda: request.param == "mkl")
    if request.param not in BLOCKS:
        monkeypatch.setattr("eyas.models.backends.packed_weights.runs_kernel", lambda dtype: False)
    reset = nn.Linear.reset_parameters

    def reset_and_round(layer: nn.Linear) -> None:
        reset(layer)
        if request.param in HALVES:
            layer.weight.data = layer.weight.data.bfloat16().to(layer.weight.dtype)

    monkeypatch.setattr(nn.Linear, "reset_parameters", reset_and_round)
    return request.param


@pytest.mark.parametrize("sizes", [(32, 48), (256, 512), (256, 4096), (7, 3)])
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "biased"])
def test_packed_layers_give_equal_results(sizes: tuple[int, int], bias: bool, layout: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, bias=bias)
    rows = [torch.randn(*shape, sizes[0]) for shape in ((1,), (2,), (1, 9), (1, 64), (3, 5), (0,), (1, 0))]
    expected = [layer(x).detach() for x in rows]
    pack_weights(layer)
    assert isinstance(layer, PackedLinear)
    assert layer.product.weight.is_half == (layout in HALVES)
    assert has_kernel(layer) == (layout in BLOCKS)
    with torch.inference_mode():
        for x, before in zip(rows, expected, strict=True):
            torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-5)


def test_a_weight_is_kept_once() -> None:
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(7, 3), Attention(64)])
    pack_weights(layers)
    assert [tuple(each.shape) for each in layers.parameters()] == [(3,)], "but for a bias"


def test_a_weight_can_be_read_as_it_was() -> None:
    """Some models read a layer's weight, for example its dtype."""
    layers = nn.ModuleList([nn.Linear(64, 40, bias=False), *Attention(64).children(), Attention(64)])
    before = [layer.weight.detach().clone() for layer in layers.modules() if isinstance(layer, nn.Linear)]
    pack_weights(layers)
    after = [layer.weight for layer in layers.modules() if isinstance(layer, nn.Linear)]
    assert all(map(torch.equal, after, before))
    assert {type(layer) for layer in layers.modules()} >= {PackedLinear, MergedLinearPart}


def test_layers_that_are_no_float32_linear_stay() -> None:
    class Odd(nn.Linear):
        """A linear layer with an arithmetic of its own."""

    layers = nn.ModuleList([nn.Linear(8, 8).bfloat16(), Odd(8, 8), nn.Conv1d(1, 1, 1)])
    kinds = [type(layer) for layer in layers]
    pack_weights(layers)
    assert [type(layer) for layer in layers] == kinds


class Attention(nn.Module):
    """The projections of an attention layer under transformers' names."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, size, bias=bias) for size in (width, width // 2, width // 2)
        )

    def forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)]


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "biased"])
def test_merged_siblings_give_equal_results(bias: bool) -> None:
    torch.manual_seed(0)
    layer = Attention(256, bias)
    inputs = [torch.randn(*shape, 256) for shape in ((1,), (1, 9), (1, 64), (1, 0))]
    expected = [layer(x) for x in inputs]
    pack_weights(layer)
    assert all(isinstance(each, MergedLinearPart) for each in layer.children())
    with torch.inference_mode():
        for x, before in zip(inputs, expected, strict=True):
            torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-5)


def test_merged_siblings_accept_other_inputs() -> None:
    """In any order: nothing of earlier rows is kept."""
    layer = Attention(256)
    rows, others = torch.randn(2, 3, 256)
    expected = layer(rows), layer(others)
    pack_weights(layer)
    with torch.inference_mode():
        for place, name in ((2, "v_proj"), (0, "q_proj"), (1, "k_proj")):
            for x, before in zip((rows, others), expected, strict=True):
                torch.testing.assert_close(getattr(layer, name)(x), before[place], rtol=1e-4, atol=1e-5)


def test_sharded_siblings_merge_with_their_local_sizes() -> None:
    """The sizes given at construction no longer hold for a shard."""
    layer, rows = Attention(1024), torch.randn(3, 1024)
    expected = [part.detach().chunk(2, -1)[0] for part in layer(rows)]
    for projection in layer.children():
        projection.weight = nn.Parameter(projection.weight.detach().chunk(2)[0].clone())
    pack_weights(layer)
    with torch.inference_mode():
        for part, before in zip(layer(rows), expected, strict=True):
            torch.testing.assert_close(part, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(300, 70), (300, 208), (512, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "biased"])
def test_a_row_gets_the_same_result_in_any_batch(sizes: tuple[int, int], bias: bool, layout: str) -> None:
    """Blocks of outputs fill tiles and leave some over. Libraries sum in other orders for other numbers of rows."""
    if layout not in BLOCKS:
        pytest.skip("a library multiplies")
    layer, rows = nn.Linear(*sizes, bias=bias), torch.randn(40, sizes[0])
    weight, expected = layer.weight.detach().clone(), layer(rows).detach()
    pack_weights(layer)
    assert torch.equal(layer.weight, weight)
    assert sum(buffer.nbytes for buffer in layer.buffers()) <= (sizes[0] * (sizes[1] + 15)) * 4, "it is kept once"
    torch.testing.assert_close(layer(rows).detach(), expected, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        together = layer(rows)
        assert all(torch.equal(layer(rows[i : i + n]), together[i : i + n]) for i in (0, 7) for n in range(1, 33))


@pytest.mark.parametrize("sizes", [(48, 16), (300, 208), (512, 4096)], ids=str)
def test_kernels_multiply_as_libraries_do(sizes: tuple[int, int], layout: str) -> None:
    if layout not in BLOCKS:
        pytest.skip("a library multiplies")
    layer = nn.Linear(*sizes)
    layer.weight.data *= 2.0**-20  # so that a half weight has a scale
    pack_weights(layer)
    product = layer.product
    assert (product.scale != 1) == (layout in HALVES)
    with torch.inference_mode():
        for count in (1, 9, 23):
            rows = torch.randn(count, sizes[0])
            torch.testing.assert_close(product.scaled(rows), product.by_library(rows), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "biased"])
def test_several_threads_multiply_by_a_library(bias: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that was packed for kernels serves later threads too."""
    if layout not in BLOCKS:
        pytest.skip("a library multiplies")
    layer, rows = nn.Linear(48, 70, bias=bias), torch.randn(9, 48)
    pack_weights(layer)
    with torch.inference_mode():
        expected = layer(rows)
        monkeypatch.setattr("eyas.models.backends.packed_weights.runs_compiled", lambda device: False)
        monkeypatch.setattr("eyas.kernels.cpu.products.multiply_weight", None)
        torch.testing.assert_close(layer(rows), expected, rtol=1e-4, atol=1e-5)


def test_weights_that_float16_does_not_hold_stay_float32() -> None:
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 1e-38, 0.5, 0.25], [1.0 + 2**-20, 3.0, 2.0, 4.0]])
    before = layer.weight.detach().clone()
    pack_weights(layer)
    assert torch.equal(layer.weight, before)
    assert isinstance(layer, PackedLinear)
    assert not layer.product.weight.is_half
