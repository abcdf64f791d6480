"""Heads load strictly: what is missing, left over or made for another target is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import CheckpointError
from eyas.models.checkpoint import head_fingerprint, target_fingerprint
from eyas.models.heads.eagle import load_fuser, load_head
from eyas.models.target import load_target
from tests.tiny import write_head, write_target


def edit_tensors(folder: Path, drop: str = "", **added: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(drop, None)
    save_file({**tensors, **added}, folder / "model.safetensors")


def test_a_missing_tensor_is_named(tiny_target: str, tmp_path: Path) -> None:
    edit_tensors(write_head(tmp_path), drop="midlayer.hidden_norm.weight")
    with pytest.raises(CheckpointError, match=r"missing midlayer\.hidden_norm\.weight"):
        load_head(str(tmp_path), tiny_target)


def test_an_unexpected_tensor_is_named(tiny_target: str, tmp_path: Path) -> None:
    edit_tensors(write_head(tmp_path), extra=torch.zeros(2))
    with pytest.raises(CheckpointError, match="unexpected extra"):
        load_head(str(tmp_path), tiny_target)


def test_a_tensor_of_another_shape_is_named(tiny_target: str, tmp_path: Path) -> None:
    edit_tensors(write_head(tmp_path), **{"norm.weight": torch.ones(5)})
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \[5\], expected \[32\]"):
        load_head(str(tmp_path), tiny_target)


def test_a_head_for_another_hidden_size_is_refused_by_both_sides(tmp_path: Path) -> None:
    head, target = write_head(tmp_path / "head", hidden=32), write_target(tmp_path / "target", hidden=64)
    for load in (load_head, load_fuser):
        with pytest.raises(CheckpointError, match="hidden size 32, but this target has 64"):
            load(str(head), str(target))


def test_a_head_for_another_vocabulary_is_refused(tiny_target: str, tmp_path: Path) -> None:
    head = write_head(tmp_path, vocab_size=40)
    with pytest.raises(CheckpointError, match="vocabulary size 40, but this target has 48"):
        load_head(str(head), tiny_target)


def test_a_vocabulary_map_out_of_range_is_refused(tiny_target: str, tmp_path: Path) -> None:
    edit_tensors(write_head(tmp_path), d2t=torch.full((24,), 1000))
    with pytest.raises(CheckpointError, match="d2t does not map 24 draft ids"):
        load_head(str(tmp_path), tiny_target)


def test_a_config_that_lacks_a_size_is_named(tiny_target: str, tmp_path: Path) -> None:
    write_head(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="intermediate_size is left out; it must be whole numbers from 1"):
        load_head(str(tmp_path), tiny_target)


def test_a_damaged_file_is_named(tiny_target: str, tmp_path: Path) -> None:
    write_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="cannot read weights"):
        load_head(str(tmp_path), tiny_target)


def test_damaged_weights_of_a_target_are_refused(tmp_path: Path) -> None:
    file = write_target(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"cannot read weights {file}: .* incomplete"):
        load_target(str(tmp_path))
    file.unlink()
    for content in (b"not a checkpoint", b""):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"cannot read weights {tmp_path}/pytorch_model.bin"):
            load_target(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", "many"), ("num_attention_heads", 0), ("rope_parameters", 3), ("hidden_act", "foo")]
)
def test_a_wrong_value_in_the_config_of_a_target_is_refused(name: str, value: object, tmp_path: Path) -> None:
    config = write_target(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match=f"{config}: {name} is {value!r}"):
        load_target(str(tmp_path))


@pytest.mark.usefixtures("unpacked")
def test_pytorch_bin_and_safetensors_give_the_same_head(tiny_target: str, tiny_head: str, tmp_path: Path) -> None:
    write_head(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    one, other = load_head(tiny_head, tiny_target), load_head(str(tmp_path), tiny_target)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(load_fuser(tiny_head, tiny_target).weight, load_fuser(str(tmp_path), tiny_target).weight)


def test_fingerprints_differ_between_models(tiny_target: str, tiny_head: str, tmp_path: Path) -> None:
    same, other = write_target(tmp_path / "same"), write_target(tmp_path / "other", seed=1)
    assert target_fingerprint(tiny_target) == target_fingerprint(str(same)) != target_fingerprint(str(other))
    assert head_fingerprint(tiny_head) != head_fingerprint(str(write_head(tmp_path / "head", seed=1)))
