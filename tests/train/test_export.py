"""`eyas train export --to vllm` and `--to sglang`: the names, shapes and settings that these engines read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.block import load_block_head
from eyas.models.heads.eagle import load_head
from eyas.models.heads.eagle_config import find_eagle_kind
from eyas.models.heads.medusa import load_medusa
from eyas.train.export import export_head
from eyas.train.methods import build_trainer
from tests.support.tiers import nightly
from tests.train.small_runs import settings

LAYER = {
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight",
}  # fmt: skip
EAGLE3 = LAYER | {"input_layernorm.weight", "hidden_norm.weight"}
BLOCK = LAYER | {"input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"}
VOCABULARY = {"lm_head.weight", "d2t", "t2d"}
MARKOV = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
CONFIDENCE = {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def under(prefix: str, names: set[str]) -> set[str]:
    return {f"{prefix}.{name}" for name in names}


# By method and engine: architecture, tensors, and settings that the engine reads. The head has 24 of 48 tokens.
EXPECTED: dict[tuple[str, str], tuple[str, set[str], dict[str, Any]]] = {
    ("eagle3", "vllm"): (
        "Eagle3LlamaForCausalLM", under("layers.0", EAGLE3) | VOCABULARY | {"fc.weight", "norm.weight"},
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "draft_vocab_size": 24, "norm_before_residual": False},
    ),
    ("eagle3.1", "vllm"): (
        "Eagle3LlamaForCausalLM",
        under("layers.0", EAGLE3) | VOCABULARY | {"fc.weight", "norm.weight", *(f"fc_norm.{n}.weight" for n in range(3))},
        {"fc_norm": True, "norm_output": True},
    ),
    ("peagle", "vllm"): (
        "Eagle3LlamaForCausalLM", under("layers.0", EAGLE3) | VOCABULARY | {"fc.weight", "norm.weight", "mask_hidden"},
        {"pard_token": 2, "parallel_drafting": True, "num_hidden_layers": 1},
    ),
    ("eagle3", "sglang"): (
        "LlamaForCausalLMEagle3", under("midlayer", EAGLE3) | VOCABULARY | {"fc.weight", "norm.weight"},
        {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
            "tie_word_embeddings": False, "draft_vocab_size": 24,
        },
    ),
    ("eagle1", "sglang"): (
        "LlamaForCausalLMEagle", under("layers.0", LAYER) | {"fc.weight", "fc.bias"}, {"num_hidden_layers": 1},
    ),
    ("dflash", "vllm"): (
        "DFlashDraftModel", under("layers.0", BLOCK) | VOCABULARY | {"fc.weight", "hidden_norm.weight", "norm.weight"},
        {"block_size": 4, "draft_vocab_size": 24, "num_target_layers": 4},
    ),
    ("dspark", "vllm"): (
        "Qwen3DSparkModel",
        under("layers.0", BLOCK) | VOCABULARY | MARKOV | CONFIDENCE | {"fc.weight", "hidden_norm.weight", "norm.weight"},
        {"mask_token_id": 2, "target_layer_ids": [1, 2, 3], "block_size": 4, "markov_rank": 8, "draft_vocab_size": 24},
    ),
    ("dflash", "sglang"): (
        "DFlashDraftModel", under("layers.0", BLOCK) | {"fc.weight", "hidden_norm.weight", "norm.weight"}, {"block_size": 4},
    ),
    ("dspark", "sglang"): (
        "DSparkDraftModel",
        under("layers.0", BLOCK) | MARKOV | CONFIDENCE | {"fc.weight", "hidden_norm.weight", "norm.weight"},
        {"mask_token_id": 2, "markov_rank": 8, "markov_head_type": "vanilla", "confidence_head_with_markov": True},
    ),
}  # fmt: skip


def written(folder: Path, out: Path, method: str, **changes: Any) -> str:
    """The folder of an untrained head."""
    given: dict[str, Any] = {} if method in ("eagle1", "medusa", "hydra") else {"head__target_layer_ids": [1, 2, 3]}
    build_trainer(settings(folder, str(folder / "target"), method, out=str(out), **(given | changes))).write_head("head")
    return str(out / "head")


@pytest.mark.parametrize(("method", "engine"), EXPECTED)
def test_an_engine_finds_its_names_shapes_and_settings(method: str, engine: str, folder: Path, tmp_path: Path) -> None:
    architecture, names, keys = EXPECTED[method, engine]
    size = 0 if method in ("dflash", "dspark") and engine == "sglang" else 24
    reduced = {} if method == "eagle1" else {"head__draft_vocab_size": size}
    layers = {"head__target_layer_ids": [0, 1, 2]} if (method, engine) == ("eagle3", "sglang") else {}
    head, target = written(folder, tmp_path, method, **reduced, **layers), str(folder / "target")
    export_head(head, target, tmp_path / "out", engine)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert config["architectures"] == [architecture]
    assert config.items() >= keys.items()
    assert layers or not any(key.startswith("eyas") for key in config)
    assert "bias" not in config, "the engines take it for a bias of attention"
    assert set(tensors) == names
    if "lm_head.weight" in names:
        assert (tensors["lm_head.weight"].shape, tensors["d2t"].shape, tensors["t2d"].shape) == ((24, 32), (24,), (48,))
    if method == "eagle3":
        prefix = "layers.0" if engine == "vllm" else "midlayer"
        assert tensors[f"{prefix}.self_attn.q_proj.weight"].shape[1] == 64, "embedding and feature side by side"
    same_head(head, str(tmp_path / "out"), target)


def same_head(one: str, two: str, target: str) -> None:
    """Both folders hold the same head when Eyas reads them."""
    if (kind := find_eagle_kind(Checkpoint(one).files)) and DraftHead(one).detected not in ("dflash", "dspark"):
        first, second = (load_head(head, target, kind=kind) for head in (one, two))
    else:
        first, second = (load_block_head(head, target) for head in (one, two))  # type: ignore[assignment]
    assert first.config.wiring == second.config.wiring
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_medusa_heads_are_in_vllms_layout(folder: Path, tmp_path: Path) -> None:
    head = written(folder, tmp_path, "medusa", head__draft_vocab_size=24)
    export_head(head, str(folder / "target"), tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"architectures": ["MedusaModel"], "num_heads": 2, "truncated_vocab_size": 24, "hidden_size": 32}
    assert config.items() >= wanted.items()
    blocks = {f"blocks.{n}.layers.0.{part}" for n in range(2) for part in ("weight", "bias")}
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {
        *blocks,
        "lm_heads.0.weight",
        "lm_heads.1.weight",
        "token_map",
    }


def test_medusa_heads_of_the_authors_get_vllms_names(folder: Path, tmp_path: Path) -> None:
    generator, target = torch.Generator().manual_seed(0), str(folder / "target")
    shapes = {"0.linear.weight": (32, 32), "0.linear.bias": (32,), "1.weight": (48, 32)}
    tensors = {f"{n}.{name}": torch.randn(s, generator=generator) for n in range(2) for name, s in shapes.items()}
    (tmp_path / "head").mkdir()
    torch.save(tensors, tmp_path / "head" / "medusa_lm_head.pt")
    (tmp_path / "head" / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    export_head(str(tmp_path / "head"), target, tmp_path / "out", "vllm")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_heads"] == 2
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["blocks.1.layers.0.weight"], tensors["1.0.linear.weight"])
    one, two = (load_medusa(str(head), target) for head in (tmp_path / "head", tmp_path / "out"))
    states = torch.randn(3, 32, generator=generator)
    assert torch.equal(one.logits(states, 2), two.logits(states, 2))


@pytest.mark.parametrize(
    ("name", "engine"),
    [("fc.bias", "vllm"), ("midlayer.self_attn.q_proj.bias", "sglang"), ("midlayer.self_attn.o_proj.bias", "vllm")],
)
def test_biases_of_eagle3_heads_are_refused(name: str, engine: str, folder: Path, tmp_path: Path) -> None:
    head = Path(written(folder, tmp_path, "eagle3", head__target_layer_ids=[0, 1, 2]))
    tensors = load_file(head / "model.safetensors")
    rows = len(tensors[name.replace("bias", "weight")])
    save_file({**tensors, name: torch.ones(rows)}, head / "model.safetensors")
    with pytest.raises(CheckpointError, match="a bias of fc or of attention"):
        export_head(str(head), str(folder / "target"), tmp_path / "out", engine)


@pytest.mark.parametrize("layout", ["vllm", nightly("sglang"), nightly("specforge"), "speculators", nightly("eyas")])
def test_a_head_that_lacks_a_tensor_is_refused(layout: str, folder: Path, tmp_path: Path) -> None:
    head = Path(written(folder, tmp_path, "eagle3", head__target_layer_ids=[0, 1, 2]))
    tensors = load_file(head / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing fc\.weight"):
        export_head(str(head), str(folder / "target"), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "engine", "changes", "reason"),
    [
        ("eagle1", "vllm", {}, "a bias of fc"),
        ("eagle3.1", "sglang", {}, "norms the target's states"),
        ("peagle", "sglang", {}, "a P-EAGLE head"),
        ("eagle3", "sglang", {}, "head.target_layer_ids up to 2"),
        ("dspark", "vllm", {"head__markov_head_type": "gated"}, "kind gated"),
        ("dspark", "sglang", {"head__draft_vocab_size": 24}, "head.draft_vocab_size 0"),
        ("hydra", "vllm", {}, "neither vLLM nor SGLang runs Hydra"),
        ("medusa", "sglang", {}, "it is vLLM's for Medusa"),
    ],
)
def test_what_an_engine_cannot_load_is_refused(
    method: str, engine: str, changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    head = written(folder, tmp_path, method, **changes)
    with pytest.raises(CheckpointError, match=reason):
        export_head(head, str(folder / "target"), tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()
