"""Heads load strictly: what is missing, left over or made for another target is named."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError
from eyas.models.fingerprints import head_fingerprint, target_fingerprint
from eyas.models.heads.eagle import load_fuser, load_head
from eyas.models.loading import load_target
from tests.support.tiny import change_config, change_tensors, write_checkpoint, write_head, write_target

DAMAGES: dict[str, Callable[[Path], object]] = {
    r"missing midlayer\.hidden_norm\.weight": partial(change_tensors, **{"midlayer.hidden_norm.weight": None}),
    "unexpected extra": partial(change_tensors, extra=torch.zeros(2)),
    r"norm.weight has shape \[5\], expected \[32\]": partial(change_tensors, **{"norm.weight": torch.ones(5)}),
    "d2t does not map 24 draft ids": partial(change_tensors, d2t=torch.full((24,), 1000)),
    "vocabulary size 40, but this target has 48": partial(write_head, vocab_size=40),
    "intermediate_size is left out; it must be whole numbers from 1": partial(change_config, intermediate_size=None),
    "cannot read weights": lambda folder: (folder / "model.safetensors").write_bytes(b"not a checkpoint"),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_what_is_wrong_with_a_head_is_named(reason: str, tiny_target: str, tmp_path: Path) -> None:
    DAMAGES[reason](write_head(tmp_path))
    with pytest.raises(CheckpointError, match=reason):
        load_head(str(tmp_path), tiny_target)


def test_a_head_for_another_hidden_size_is_refused_by_both_sides(tmp_path: Path) -> None:
    head, target = write_head(tmp_path / "head", hidden=32), write_target(tmp_path / "target", hidden=64)
    for load in (load_head, load_fuser):
        with pytest.raises(CheckpointError, match="hidden size 32, but this target has 64"):
            load(str(head), str(target))


def test_fingerprints_differ_between_models(tiny_target: str, tiny_head: str, tmp_path: Path) -> None:
    same, other = write_target(tmp_path / "same"), write_target(tmp_path / "other", seed=1)
    assert target_fingerprint(tiny_target) == target_fingerprint(str(same)) != target_fingerprint(str(other))
    assert head_fingerprint(tiny_head) != head_fingerprint(str(write_head(tmp_path / "head", seed=1)))


def _rows(start: int, end: int) -> tuple[slice, ...]:
    return (slice(start, end),)


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        pytest.param((4096, 1024), (slice(None), slice(77, 78)), id="a column"),
        pytest.param((4096, 1024), _rows(1111, 1111 + 2 * 128), id="rows of two parts"),
        pytest.param((4096, 8), _rows(4000, 4096), id="narrow rows"),
        pytest.param((64, 8, 1024), (41,), id="one expert of many"),
        pytest.param((3, 512, 1024), (slice(None), slice(None), slice(1023, 1024)), id="a column of all experts"),
        pytest.param((32, 1024), (31, 5), id="an element of few rows"),
        pytest.param((5000,), (4999,), id="an element of a vector"),
    ],
)
def test_a_change_in_any_large_part_changes_the_fingerprint(
    shape: tuple[int, ...], place: tuple[Any, ...], tmp_path: Path
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    digests = []
    for change in (0.0, 0.0, 0.5):
        weight[place] += change
        folder = write_checkpoint(tmp_path / str(len(digests)), {"model_type": "llama"}, {"weight": weight})
        digests.append(target_fingerprint(Path(folder)))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("ids", [48, [1, 99], -7])
def test_end_tokens_beyond_the_vocabulary_are_a_warning(
    ids: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_target(tmp_path)
    change_config(folder, eos_token_id=ids)
    (folder / "generation_config.json").unlink()
    assert load_target(str(folder)).eos_ids == ({1} if isinstance(ids, list) else set())
    assert f"{folder / 'config.json'}: eos_token_id holds {99 if isinstance(ids, list) else ids}" in caplog.text
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1000]}))
    assert load_target(str(folder)).eos_ids == {7}
    assert f"{folder / 'generation_config.json'}: eos_token_id holds 1000" in caplog.text


@pytest.mark.parametrize("count", [2, 5])
def test_layers_that_the_config_leaves_out_are_refused(count: int, tmp_path: Path) -> None:
    change_config(write_target(tmp_path), num_hidden_layers=count)
    with pytest.raises(CheckpointError, match=f"num_hidden_layers is {count}, but the weights hold 4 layers"):
        load_target(str(tmp_path))


EXTRAS: dict[str, dict[str, torch.Tensor]] = {
    "a layer for multi-token prediction": {
        "model.layers.4.eh_proj.weight": torch.ones(32, 64), "model.layers.4.self_attn.q_proj.weight": torch.ones(32, 32)
    },
    "a table of RoPE": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "a vision tower": {"vision_tower.encoder.layers.9.self_attn.q_proj.weight": torch.ones(4, 4)},
    "a part of another module for multi-token prediction": {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(32, 32)},
}  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS)
def test_tensors_beside_the_layers_are_left_out(extra: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_target(tmp_path)
    change_tensors(folder, **EXTRAS[extra])
    assert len(load_target(str(folder)).model.get_decoder().layers) == 4
    is_known = extra in ("a table of RoPE", "a layer for multi-token prediction")
    assert ("they are not used" in caplog.text) == (not is_known)


def test_the_setting_behind_a_wrong_shape_is_named(tmp_path: Path) -> None:
    change_config(write_target(tmp_path), vocab_size=40)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \[48, 32\], .*\[40, 32\] \(vocab_size 40\)"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("name", ["norm", "layers.1.self_attn.k_proj", "layers.1.self_attn.o_proj"])
def test_weights_that_are_no_numbers_are_named(name: str, tmp_path: Path) -> None:
    """Also those of layers that are packed and merged."""
    folder = write_target(tmp_path)
    weight = load_file(folder / "model.safetensors")[f"model.{name}.weight"]
    change_tensors(folder, **{f"model.{name}.weight": weight * math.nan})
    with pytest.raises(CheckpointError, match=rf": model\.{name}\.weight hold NaN or infinity"):
        load_target(str(folder))


def wrapped(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("form", ["module.", "_orig_mod.module.", "state_dict", "model", "inv_freq"])
def test_a_trainers_wrapping_is_taken_off(form: str, tiny_target: str, tiny_head: str, tmp_path: Path) -> None:
    file = write_head(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    if form in ("state_dict", "model"):
        torch.save({form: tensors, "epoch": 3}, tmp_path / "pytorch_model.bin")
        file.unlink()
    elif form == "inv_freq":
        change_tensors(tmp_path, **{"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    else:
        save_file(wrapped(tensors, form), file)
    one, other = load_head(tiny_head, tiny_target), load_head(str(tmp_path), tiny_target)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(load_fuser(tiny_head, tiny_target).weight, load_fuser(str(tmp_path), tiny_target).weight)
    assert DraftHead(str(tmp_path)).detected == "eagle3"


@pytest.mark.usefixtures("unpacked")
def test_a_head_over_all_tokens_borrows_the_targets_lm_head(tiny_target: str, tmp_path: Path) -> None:
    write_head(tmp_path, draft_vocab=48)
    change_tensors(tmp_path, **{"lm_head.weight": None})
    target = load_file(Path(tiny_target) / "model.safetensors")
    assert torch.equal(load_head(str(tmp_path), tiny_target).lm_head.weight, target["lm_head.weight"])
    change_tensors(write_head(tmp_path), **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        load_head(str(tmp_path), tiny_target)


def test_a_head_of_no_known_kind_is_called_no_language_model(tmp_path: Path) -> None:
    write_head(tmp_path)
    save_file(wrapped(load_file(tmp_path / "model.safetensors"), "own."), tmp_path / "model.safetensors")
    change_config(tmp_path, architectures=["LlamaForCausalLM"])
    assert DraftHead(str(tmp_path)).detected is None


def test_a_tensor_that_the_index_leaves_out_is_named(tiny_target: str, tmp_path: Path) -> None:
    write_head(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors | {"extra": torch.zeros(2)}, tmp_path / "part.safetensors")
    with pytest.raises(CheckpointError, match="unexpected extra"):
        load_head(str(tmp_path), tiny_target)
