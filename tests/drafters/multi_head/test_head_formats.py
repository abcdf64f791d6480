"""Medusa and Hydra checkpoints give equal heads in every layout; those that do not fit are refused with a reason."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import CheckpointError, ConfigError
from eyas.models.heads.hydra import load_hydra
from eyas.models.heads.medusa import load_medusa
from tests.drafters.multi_head.naive_heads import NaiveHeads
from tests.support.tiny import write_checkpoint
from tests.support.tiny_medusa_hydra import config_of, tensors_of, tiny_heads

Tensors = dict[str, torch.Tensor]

STATES = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
TOKEN_MAP = torch.tensor([40, 3, 17, 0, 9, 30, 31, 8])


def medusa_logits(folder: str | Path, target: str, count: int = 3) -> torch.Tensor:
    return load_medusa(str(folder), target).logits(STATES, count)


def in_vllm_names(tensors: Tensors, layers: int) -> Tensors:
    named = {}
    for name, tensor in tensors.items():
        head, place, *rest = name.split(".")
        named[f"blocks.{head}.layers.{place}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"] = tensor
    return named


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_medusa_layouts_of_authors_and_vllm_load_equal_heads(layers: int, tmp_path: Path, tiny_target: str) -> None:
    tensors, config = tensors_of("medusa", layers=layers), config_of("medusa", layers=layers)
    plain = NaiveHeads("medusa", tiny_target, layers)
    expected = torch.stack([torch.stack([plain.logits(s, 0, (0,) * i) for i in range(3)]) for s in STATES])
    written = write_checkpoint(tmp_path / "authors", config, tensors)
    torch.testing.assert_close(medusa_logits(written, tiny_target), expected)
    for name, change in (("pt", str), ("prefixed", "medusa_heads.{}".format)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        renamed = {change(key): tensor for key, tensor in tensors.items()}
        if name == "pt":
            torch.save(renamed, folder / "medusa_lm_head.pt")
        else:
            save_file(renamed, folder / "medusa_lm_head.safetensors")
        torch.testing.assert_close(medusa_logits(folder, tiny_target), expected)
    vllm = write_checkpoint(tmp_path / "vllm", {"num_heads": 3, "medusa_fc_bias": True}, in_vllm_names(tensors, layers))
    torch.testing.assert_close(medusa_logits(vllm, tiny_target), expected)


def test_tied_blocks_that_a_file_keeps_once_are_used_again(tmp_path: Path, tiny_target: str) -> None:
    tensors = tensors_of("medusa", layers=3)
    tied = {name: tensors[name.replace(".1.linear", ".0.linear").replace(".2.linear", ".0.linear")] for name in tensors}
    once = {name: tensor for name, tensor in tied.items() if ".1.linear" not in name and ".2.linear" not in name}
    whole, short = (write_checkpoint(tmp_path / name, {}, t) for name, t in (("a", tied), ("b", once)))
    torch.testing.assert_close(medusa_logits(whole, tiny_target), medusa_logits(short, tiny_target))


@pytest.mark.parametrize("cut", ["already cut", "whole"])
def test_a_token_map_limits_the_draft_vocabulary(cut: str, tmp_path: Path, tiny_target: str) -> None:
    tensors = in_vllm_names(tensors_of("medusa", layers=1), 1)
    full = medusa_logits(write_checkpoint(tmp_path / "full", {}, tensors), tiny_target)
    outputs = {
        name: t[TOKEN_MAP] if name.startswith("lm_heads") and cut == "already cut" else t for name, t in tensors.items()
    }
    mapped = load_medusa(write_checkpoint(tmp_path / "map", {}, {**outputs, "token_map": TOKEN_MAP}), tiny_target)
    assert mapped.draft_ids.tolist() == TOKEN_MAP.tolist()
    torch.testing.assert_close(mapped.logits(STATES, 3), full[:, :, TOKEN_MAP])


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_heads_may_share_an_output_layer_and_scale_it(name: str, tmp_path: Path, tiny_target: str) -> None:
    tensors = in_vllm_names(tensors_of("medusa", layers=1), 1)
    output = tensors["lm_heads.0.weight"]
    repeated = {key: output.clone() if key.startswith("lm_heads") else tensor for key, tensor in tensors.items()}
    shared = {key: tensor for key, tensor in tensors.items() if not key.startswith("lm_heads")} | {name: output}
    expected = medusa_logits(write_checkpoint(tmp_path / "repeated", {}, repeated), tiny_target)
    found = medusa_logits(
        write_checkpoint(tmp_path / "shared", {"original_lm_head": True, "logit_scale": 0.5}, shared), tiny_target
    )
    torch.testing.assert_close(found, expected / 2)


def test_blocks_may_lack_biases(tmp_path: Path, tiny_target: str) -> None:
    tensors = tensors_of("medusa")
    zeroed = {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}
    expected = medusa_logits(write_checkpoint(tmp_path / "zeroed", {}, zeroed), tiny_target)
    torch.testing.assert_close(medusa_logits(write_checkpoint(tmp_path / "without", {}, without), tiny_target), expected)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "missing blocks.1.layers.0.bias"),
        (lambda t: t.pop("2.2.weight"), "missing lm_heads.2.weight"),
        (lambda t: t.update({"lm_head_extra": t["0.2.weight"]}), "unexpected lm_head_extra"),
        (lambda t: t.update({"0.1.linear.weight": torch.zeros(31, 32)}), r"has shape \[31, 32\], expected \[32, 32\]"),
        (lambda t: t.update({"token_map": torch.tensor([1, 48])}), "token_map does not map draft ids to distinct"),
        (lambda t: t.update({"token_map": torch.tensor([1, 1])}), "token_map does not map draft ids to distinct"),
        (lambda t: t.clear(), "holds no Medusa heads"),
    ],
)
def test_medusa_files_that_do_not_fit_say_why(change, complaint: str, tmp_path: Path, tiny_target: str) -> None:  # type: ignore[no-untyped-def]
    tensors = tensors_of("medusa")
    change(tensors)
    with pytest.raises(CheckpointError, match=complaint):
        load_medusa(write_checkpoint(tmp_path / "heads", {}, tensors), tiny_target)
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        load_medusa(str(tmp_path / "heads"), tiny_target, "int3")


@pytest.mark.parametrize("kind", ["hydra", "hydra-prefix"])
def test_hydra_files_of_the_authors_load(kind: str, tmp_path: Path, tiny_target: str, tiny_head: str) -> None:
    """As torch saves them, with the target's embedding; and, in safetensors, with tied blocks kept once."""
    tensors, folder = tensors_of(kind, layers=3), tmp_path / "heads"
    step, first = (2, 1) if kind == "hydra-prefix" else (1, 0)
    for head in range(3):
        for part in ("weight", "bias"):
            second, third = (f"hydra_mlp.{head}.{first + step * layer}.linear.{part}" for layer in (1, 2))
            tensors[third] = tensors[second]
    embedding = NaiveHeads(kind, tiny_target).embedding
    whole = write_checkpoint(folder, config_of(kind, layers=3), tensors)
    expected = load_hydra(whole, tiny_target)
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "input_embed_fn.weight": embedding}, folder / "hydra_lm_head.pt")
    saved = load_hydra(str(folder), tiny_target)
    third = f".{first + 2 * step}.linear"
    once = {name: tensor for name, tensor in tensors.items() if third not in name or not name.startswith("hydra_mlp")}
    short = load_hydra(write_checkpoint(tmp_path / "short", config_of(kind, layers=3), once), tiny_target)
    inputs = torch.randn(5, 4 * 32, generator=torch.Generator().manual_seed(2))
    for loaded in (saved, short):
        torch.testing.assert_close(loaded.logits(inputs, 2), expected.logits(inputs, 2))
        torch.testing.assert_close(loaded.embedding, expected.embedding)
    assert (saved.prefix is not None) == (kind == "hydra-prefix")


def test_a_token_map_serves_hydra_too(tmp_path: Path, tiny_target: str, tiny_head: str) -> None:
    full = load_hydra(tiny_heads("hydra", tiny_head), tiny_target)
    mapped = write_checkpoint(tmp_path / "map", config_of("hydra"), {**tensors_of("hydra"), "token_map": TOKEN_MAP})
    inputs = torch.cat([STATES, STATES], -1)
    torch.testing.assert_close(load_hydra(mapped, tiny_target).logits(inputs, 0), full.logits(inputs, 0)[:, TOKEN_MAP])


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"hydra_head_arch": "cross-attn"}, "hydra_head_arch is 'cross-attn'; Eyas runs mlp and prefix-mlp only"),
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch is 'eagle-attn'"),
        ({"grounded_heads": False}, "grounded_heads is False"),
        ({"hidden_state_offset": 1}, "hidden_state_offset is 1"),
        ({"hydra_num_heads": None}, "hydra_num_heads is left out"),
        ({"hydra_num_heads": 4}, "missing hydra_lm_head.3.bias, hydra_lm_head.3.weight"),
        ({"hydra_num_layers": 1}, "unexpected hydra_mlp.0.1.linear.bias"),
        ({"hydra_head_arch": "prefix-mlp"}, "missing hydra_lm_head.0.1.weight"),
    ],
)
def test_hydra_heads_of_other_kinds_are_refused_by_name(
    setting: dict[str, object], complaint: str, tmp_path: Path, tiny_target: str
) -> None:
    folder = write_checkpoint(tmp_path / "heads", {**config_of("hydra"), **setting}, tensors_of("hydra"))
    with pytest.raises(CheckpointError, match=complaint):
        load_hydra(folder, tiny_target)


def test_heads_of_another_target_are_refused(tmp_path: Path, tiny_target: str) -> None:
    for kind, load in (("medusa", load_medusa), ("hydra", load_hydra)):
        for size, tensors in (
            ("hidden size 16", tensors_of(kind, hidden=16)),
            ("vocabulary size 50", tensors_of(kind, vocab=50)),
        ):
            other = write_checkpoint(tmp_path / f"{kind} {size}", config_of(kind), tensors)
            with pytest.raises(CheckpointError, match=f"made for a target of {size}, but this target has"):
                load(other, tiny_target)
