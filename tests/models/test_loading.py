"""How a checkpoint's weights are read on a CPU: one by one, exactly, and kept once."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from eyas.models.backends.packed_weights import PackedEmbedding, PackedWeight, pack_weights
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from tests.support.families import FAMILIES, config_of, write_model

TOKENS = torch.tensor([[5, 0, 47, 5]])
MAPPINGS = Path("/proc/self/maps")


def write_half(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> str:
    kind, settings = FAMILIES[name]
    return str(write_model(folder, config_of(kind, **settings), dtype))


def num_bytes(target: TargetModel) -> int:
    tensors = [*target.model.parameters(), *target.model.buffers()]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-tied", "float32"), ("llama-3", "bfloat16"), ("gemma-2", "float32"), ("gemma-3", "bfloat16"),
        ("qwen-3", "float32"), ("phi-3", "bfloat16"),
    ],
)  # fmt: skip
def test_rows_of_an_embedding_are_those_of_the_checkpoint(name: str, dtype: str, tmp_path: Path) -> None:
    """Also where a family multiplies them by a number, which bfloat16 would round."""
    folder = write_half(tmp_path, name)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).get_input_embeddings()(TOKENS)
    target = load_target(folder, dtype)
    got = target.model.get_input_embeddings()(TOKENS)
    assert target.dtype == got.dtype == getattr(torch, dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["llama-tied", "gemma-3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_has_no_memory_of_its_own(name: str, dtype: str, tmp_path: Path) -> None:
    target = load_target(write_half(tmp_path, name), dtype)
    embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.packed is head.packed
    assert torch.equal(embedding.weight.float(), head.weight)


def test_an_untied_embedding_keeps_the_dtype_of_the_file(tmp_path: Path) -> None:
    target = load_target(write_half(tmp_path, "llama-3"))
    embedding = target.model.get_input_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.packed.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_target_holds_nothing_of_its_files(dtype: str, tmp_path: Path) -> None:
    if not MAPPINGS.exists():
        pytest.skip("only Linux lists a process's mappings")
    target = load_target(write_half(tmp_path, "qwen-3"), dtype)
    assert str(tmp_path) not in MAPPINGS.read_text()
    assert num_bytes(target) > 0


def test_weights_take_no_more_than_in_their_file(tmp_path: Path) -> None:
    folder = write_half(tmp_path, "llama-3")
    stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    assert num_bytes(load_target(folder)) <= 1.1 * stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [1.0, 2.0**-20, 2.0**-100], ids=["narrow", "wide", "too wide for halves"])
def test_packed_weights_keep_every_bit(dtype: torch.dtype, least: float) -> None:
    weight = torch.randn(37, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] *= least
    packed, rows = PackedWeight.of(weight), torch.tensor([[3, 36], [0, 3]])
    assert torch.equal(packed.dense, weight.float())
    if not packed.layout.is_mkldnn:
        assert torch.equal(packed.take(rows), weight[rows].float())


class ShiftedEmbedding(nn.Embedding):
    """An embedding that does more to its rows than `PackedEmbedding` knows."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + 1.0


def test_an_embedding_of_unknown_arithmetic_keeps_its_weight() -> None:
    model = nn.ModuleDict({"embedding": ShiftedEmbedding(48, 32, padding_idx=40), "head": nn.Linear(32, 48, bias=False)})
    model["head"].weight = model["embedding"].weight
    expected = model["embedding"](TOKENS)
    pack_weights(model)
    assert type(model["embedding"]) is ShiftedEmbedding
    assert torch.equal(model["embedding"](TOKENS), expected)
