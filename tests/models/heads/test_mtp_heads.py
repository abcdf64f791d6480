"""Modules for multi-token prediction load from every layout, strictly; and validation finds what they feed back."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.cache.kv_cache import KVCache
from eyas.config.mtp_layouts import default_method, find_modules
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads import mtp
from eyas.models.heads.mtp import load_mtp_head
from eyas.models.heads.validation import validate_mtp_head
from eyas.models.inputs import Segment, pack
from eyas.models.loading import load_target
from tests.support.family_configs import MODULES
from tests.support.tiny import change_config, change_tensors
from tests.support.tiny_mtp import DEEPSEEK, FAMILIES, HIDDEN, LAYERS, write_mtp

LAYER = f"model.layers.{LAYERS}."


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_is_found_below_any_prefix(family: str, tmp_path: Path) -> None:
    names = list(load_file(Path(write_mtp(tmp_path, family), "model.safetensors")))
    for prefix in ("", "language_model."):
        found = find_modules([prefix + name for name in names], LAYERS)
        assert found
        assert (found.count, found.name(found.layout.layer)) == (1, prefix + FAMILIES[family].layer)
        assert all(found.owns(prefix + name) for name in names if "mtp" in name or name.startswith(LAYER))
        assert not any(found.owns(prefix + name) for name in names if name.startswith("model.layers.1."))
    assert find_modules([name for name in names if FAMILIES[family].names[0] != name], LAYERS) is None


MISTAKES: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "a norm is missing": ({DEEPSEEK[1]: None}, f"lacks tensors of its module for multi-token prediction: {DEEPSEEK[1]}"),
    "the final norm is missing": ({DEEPSEEK[3]: None}, f"lacks tensors of its module .*: {DEEPSEEK[3]}"),
    "a part of the layer is missing": (
        {f"{LAYER}self_attn.q_proj.weight": None}, rf"missing {LAYER}self_attn\.q_proj\.weight",
    ),
    "the layer has another tensor": (
        {f"{LAYER}self_attn.sinks": torch.ones(4)}, rf"unexpected {LAYER}self_attn\.sinks",
    ),
    "a shape is another": (
        {f"{LAYER}input_layernorm.weight": torch.ones(16)}, rf"of another shape {LAYER}input_layernorm\.weight",
    ),
    "the projection is narrow": ({DEEPSEEK[0]: torch.ones(HIDDEN, HIDDEN)}, rf"eh_proj.weight has shape \[{HIDDEN}, 32\]"),
    "weights are quantised": ({DEEPSEEK[0]: torch.ones(HIDDEN, 2 * HIDDEN).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
    "weights are no numbers": ({f"{LAYER}self_attn.o_proj.weight": torch.full((32, 32), torch.nan)}, "holds NaN"),
    "an expert is missing": ({f"{LAYER}mlp.experts.3.up_proj.weight": None}, "multi-token prediction"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_damaged_module_is_refused_by_its_tensors(mistake: str, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "damaged", "glm4_moe")
    changes, message = MISTAKES[mistake]
    change_tensors(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_mtp_head(folder, folder)


def test_a_target_without_a_module_is_named_with_the_layouts(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "without", "glm4_moe", modules=False)
    with pytest.raises(CheckpointError, match=rf"layers\.{LAYERS}\.eh_proj\.weight, mtp\.fc\.weight, mtp_linear_proj"):
        load_mtp_head(folder, folder)


def test_only_files_with_the_module_and_the_vocabulary_are_read(tmp_path: Path) -> None:
    """Of a checkpoint in shards; the others need not hold anything that can be read."""
    folder = Path(write_mtp(tmp_path / "shards", "glm4_moe"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {"module": {}, "vocabulary": {}, "layers": {}}
    for name, tensor in tensors.items():
        shards["module" if name.startswith(LAYER) else "layers" if ".layers." in name else "vocabulary"][name] = tensor
    for shard, own in shards.items():
        save_file(own, folder / f"{shard}.safetensors")
    index = {"weight_map": {name: f"{shard}.safetensors" for shard, own in shards.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "layers.safetensors").write_bytes(b"not fetched")
    assert load_mtp_head(str(folder), str(folder)).kv_shapes


def test_several_modules_read_the_vocabulary_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_mtp(tmp_path / "three", "glm4_moe", count=3)
    reads = list[tuple[str, ...]]()
    read = Checkpoint.tensor

    def counted(checkpoint: Checkpoint, names: tuple[str, ...]) -> torch.Tensor:
        reads.append(names)
        return read(checkpoint, names)

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    assert load_mtp_head(folder, folder).num_modules == 3
    assert len(reads) == 2


def test_plain_modules_of_a_quantised_target_load_if_asked_for(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "target", "glm4_moe")
    change_config(folder, quantization_config={"quant_method": "fp8"})
    assert load_mtp_head(folder, folder).num_modules == 1
    change_tensors(folder, **{"lm_head.weight": torch.ones(48, HIDDEN).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has dtype torch\.float8_e4m3fn"):
        load_mtp_head(folder, folder)


@pytest.mark.parametrize("narrow", ["fp8", "int8"])
def test_weights_of_8_bits_move_states_little(narrow: str, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "target", "glm4_moe")
    rows = np.arange(6)
    features = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(0))
    packed = pack([Segment(rows + 5, rows, rows, rows[:0], None, rows)], torch.device("cpu"))
    states = []
    for quantization in ("", narrow):
        head = load_mtp_head(folder, folder, quantization=quantization)
        kv_cache = KVCache(8, head.kv_shapes, 0, head.dtype, torch.device("cpu"))
        with torch.inference_mode():
            states.append(head.run_slots(features, packed, kv_cache))
    error = (states[1] - states[0]).norm() / states[0].norm()
    assert 0 < error < 0.1


def test_a_module_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, "nemotron_h")
    change_config(folder, mtp_layers_block_type=["full_attention", "linear_attention"])
    with pytest.raises(CheckpointError, match="its module for multi-token prediction has recurrent layers"):
        load_mtp_head(folder, folder)


def test_the_page_lists_the_families_that_are_tested() -> None:
    assert set(MODULES) == set(FAMILIES) - {"llama"}
    for family, layer in MODULES.items():
        first = layer.removesuffix(".*").replace("{L+k}", f"{LAYERS}").replace("{k}", "0")
        assert first == FAMILIES[family].layer


def fed_back(folder: Path) -> str:
    """A target that agrees with its module, whose hidden states disturb it at some widths; normed ones leave these out."""
    path = write_mtp(folder, "llama", agrees=True)
    projection = torch.eye(HIDDEN, 2 * HIDDEN)
    gain = torch.ones(HIDDEN)
    generator = torch.Generator().manual_seed(5)
    gain[-8:] = 0.0
    projection[:, -8:] = 3 * torch.randn(HIDDEN, 8, generator=generator)
    change_tensors(path, **{"mtp.fc.weight": projection, "model.norm.weight": gain, "mtp.norm.weight": gain.clone()})
    return path


def test_validation_finds_what_the_module_feeds_back(tmp_path: Path) -> None:
    folder = fed_back(tmp_path / "target")
    target = load_target(folder)
    report = validate_mtp_head(target, folder, folder, "float32", "cpu")
    assert report.config_is_right
    assert (report.best.first, report.best.second) == (1.0, 1.0)
    assert all(score.accepted < report.best.accepted for score in report.scores[1:])
    change_config(folder, eyas={"aux_hidden_state_layers": [-1], "norm_before_residual": False, "output": "state"})
    report = validate_mtp_head(load_target(folder), folder, folder, "float32", "cpu")
    assert not report.config_is_right
    assert report.best.wiring == mtp.STATED_WIRING
    assert "output state" in f"{report}"


def test_another_recorded_wiring_is_another_fingerprint(tmp_path: Path) -> None:
    """So that no verifier sends a draft service features of another kind."""
    folder = write_mtp(tmp_path / "target", "llama")
    before = DraftHead("", "mtp", folder).features_fingerprint()
    assert DraftHead("", "mtp", folder).features_fingerprint() == before
    change_config(folder, eyas={"aux_hidden_state_layers": [LAYERS], "norm_before_residual": False, "output": "normed"})
    assert DraftHead("", "mtp", folder).features_fingerprint() != before


def test_the_default_is_the_module_of_the_targets_own_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = write_mtp(tmp_path / "a", "glm4_moe")
    without = write_mtp(tmp_path / "b", "glm4_moe", modules=False)
    assert DraftHead("", "", own, has_default=True).method == "mtp"
    assert "drafts come from its own module" in caplog.text
    assert DraftHead("", "", without, has_default=True).method == "none"
    assert "announces 1 modules for multi-token prediction, but its files hold none" in caplog.text
    change_tensors(without, **{"model.mtp.layers.0.input_proj.weight": torch.ones(2)})
    assert DraftHead("", "", without, has_default=True).method == "none"
    assert "hold them in a layout that Eyas does not know, model.mtp.layers.0.input_proj.weight; it is" in caplog.text
    assert DraftHead("", "none", own, has_default=True).method == "none"
    assert DraftHead("", "", own).method == "none"
    change_config(own, quantization_config={"quant_method": "fp8"})
    assert DraftHead("", "", own, has_default=True).method == "none"
    assert "weights quantised by fp8" in caplog.text


def test_a_header_is_enough_to_see_a_module(tmp_path: Path) -> None:
    """The names of the only file are those that safetensors finds. A damaged one is left to its loader."""
    folder = Path(write_mtp(tmp_path, "llama"))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert find_modules(list(file.keys()), LAYERS)
    assert default_method("x", lambda name: found if (found := folder / name).exists() else None) == "mtp"
    for damaged in (b"", b"\xff" * 16, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"):
        (folder / "model.safetensors").write_bytes(damaged)
        assert default_method("x", lambda name: found if (found := folder / name).exists() else None) == "none"
