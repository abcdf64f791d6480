"""The output head multiplies half-precision weights in float32."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eyas.models.layers.numerics import Float32Head, float32_linear, keeps_logits, logits_into, use_float32_head
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from tests.models.test_target import make_kv_cache, run, segment
from tests.support.families import FAMILIES, config_of, write_model

TOKENS = list(range(3, 40))


def logits_of(target: TargetModel) -> torch.Tensor:
    slots = torch.arange(400).numpy()
    return run(target, [segment(TOKENS, 0, slots[:37], slots[:0])], make_kv_cache(target))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(5, 64), (1, 3, 64), (1, 0, 64)])
def test_products_are_summed_and_returned_in_float32(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows).to(dtype), torch.randn(50, 64).to(dtype), torch.randn(50).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    got = float32_linear(x, weight, bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)


def test_chunks_of_the_vocabulary_equal_the_whole() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4096).bfloat16(), torch.randn(700, 4096).bfloat16()
    expected = F.linear(x.float(), weight.float())
    torch.testing.assert_close(float32_linear(x, weight, None), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama-tied", "llama-3", "gemma-2", "phi-3", "mixtral"])
def test_logits_of_a_bfloat16_target_are_not_rounded_to_bfloat16(name: str, tmp_path: Path) -> None:
    """The reference is the same target with only its head converted to float32."""
    kind, settings = FAMILIES[name]
    folder = write_model(tmp_path, config_of(kind, **settings), torch.bfloat16)
    target = load_target(folder, "bfloat16")
    got = logits_of(target)
    assert got.dtype == torch.float32
    assert (got != got.bfloat16().float()).float().mean() > 0.9, "nearly every logit has bits below bfloat16's"
    head = target.model.get_output_embeddings()
    assert head.weight.dtype == torch.float32
    head.dtype = None  # that of its input, as of other layers
    rounded = logits_of(target)
    assert torch.equal(rounded, rounded.bfloat16().float())
    torch.testing.assert_close(got, rounded, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["llama-3", "llama-tied", "gemma-2", "gemma-4", "hunyuan-moe", "gpt-2", "mixtral"])
def test_logits_that_nothing_scales_are_written_in_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.models.loading.optimize_for_cpu", lambda *_: None)  # the head stays as on a GPU
    kind, settings = FAMILIES[name]
    target = load_target(write_model(tmp_path, config_of(kind, **settings), torch.bfloat16), "bfloat16")
    expected, room = logits_of(target), torch.empty(50, target.vocab_size)
    with logits_into(target.model, room):
        got = logits_of(target)
    assert torch.equal(got, expected)
    assert keeps_logits(target.model) == (got.data_ptr() == room.data_ptr())
    assert logits_of(target).data_ptr() != room.data_ptr()


def test_an_unusual_output_head_stays_unchanged(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        pass

    target = load_target(write_model(tmp_path, config_of("llama"), torch.bfloat16), "bfloat16")
    odd = Odd(32, 48, bias=False, dtype=torch.bfloat16)
    target.model.set_output_embeddings(odd)
    use_float32_head(target.model)
    assert type(odd) is Odd


def test_a_float32_target_keeps_its_own_head(tiny_target: str) -> None:
    assert not isinstance(load_target(tiny_target).model.get_output_embeddings(), Float32Head)
