"""Widening: a target and every kind of head compute in a large shape what they computed in their own."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config
from typer.testing import CliRunner

from benchmarks.widen import sparse
from benchmarks.widen.__main__ import main
from benchmarks.widen.heads import widen
from benchmarks.widen.target import SHAPES, Shape, widen_target
from eyas import LLM
from eyas.api.request import SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.device.placement import DTYPES
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError, ConfigError
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.progress import Progress
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.tiny import fixed_config, write_eagle1_head, write_head, write_small, write_target
from tests.support.tiny_block import KINDS, tiny_block_head, tiny_peagle_head
from tests.support.tiny_medusa_hydra import config_of, tensors_of, tiny_heads

# Twelve heads in four groups, wider heads, more of everything.
WIDE = Shape(96, 112, 7, 12, 4, 16, vocab_size=75, draft_vocab_size=40)
# A group of one: a key-value head has to be there twice for its two query heads.
UNGROUPED = replace(WIDE, num_kv_heads=12)
TREE = TreeConfig(12, 3, 3)
TOKENS = tuple(range(3, 45, 2))
HEADS = ("eagle1", "eagle3", "peagle", "medusa", "hydra", "sps", *(name for name in KINDS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and every kind of head, and the same widened."""
    base = tmp_path_factory.mktemp("widen")
    target = str(write_target(base / "target"))
    write_eagle1_head(base / "eagle1")
    peagle = tiny_peagle_head(str(write_head(base / "eagle3")))
    found = {"peagle": peagle, "sps": write_small(target)} | {kind: tiny_block_head(kind, target) for kind in KINDS}
    found |= {kind: tiny_heads(kind, str(base / "eagle3")) for kind in ("medusa", "hydra")}
    heads = [found.get(name, str(base / name)) for name in HEADS]
    for shape, out in ((WIDE, "wide"), (UNGROUPED, "ungrouped"), (replace(WIDE, vocab_size=0), "kept")):
        written = write(target, heads, shape, base / out)
        for name, folder in zip(HEADS, written[1:], strict=True):
            folder.rename(base / out / name)
    for name, head in zip(HEADS, heads, strict=True):
        Path(head).rename(base / name)
    return base


def write(target: str, heads: Sequence[str], shape: Shape, out: Path, dtype: str = "float64") -> list[Path]:
    with Progress() as progress:
        return widen(target, heads, shape, out, dtype, progress)


@pytest.fixture
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what computes in float32 at least compute in float64."""
    to = torch.Tensor.to

    def to_float64(self: Tensor, *args: Any, **others: Any) -> Tensor:
        found: Tensor = to(self, *(torch.float64 if arg is torch.float32 else arg for arg in args), **others)
        return found

    monkeypatch.setattr("eyas.device.placement.DTYPES", (*DTYPES, "float64"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "to", to_float64)


def logits_of(folder: Path) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("shape", ["wide", "ungrouped", "kept"])
def test_a_widened_target_has_the_same_logits(shape: str, folders: Path) -> None:
    expected, found = logits_of(folders / "target"), logits_of(folders / shape / "target")
    torch.testing.assert_close(found[:, :48], expected, atol=1e-6, rtol=1e-6)
    assert found.shape[1] == (48 if shape == "kept" else 75)
    assert bool((found[:, 48:] < -150).all()), "a draw may take a new token"


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_biases_and_head_norms_are_widened_too(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
    config = kinds[family](
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.25, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "small")
    (folder,) = write(str(tmp_path / "small"), [], WIDE, tmp_path)
    found, expected = logits_of(folder), logits_of(tmp_path / "small")
    torch.testing.assert_close(found[:, :48], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, "wide") for name in HEADS), *((n, s) for n in ("eagle3", "dspark", "hydra") for s in ("ungrouped", "kept"))],
)
def test_a_widened_head_drafts_the_same_trees(name: str, shape: str, folders: Path) -> None:
    expected, found = (draft(folder / name, folder / "target") for folder in (folders, folders / shape))
    assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
    assert found.num_drafted > 2
    assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-6)


@lru_cache
def states_of(target: str, layers: tuple[int, ...]) -> torch.Tensor:
    """What these layers of a target give for all of TOKENS but the last, in float64."""
    model = load_target(target, "float64", aux_hidden_state_layers=layers)
    rows, none = np.arange(len(TOKENS) - 1), np.zeros(0, dtype=np.int64)
    segment = Segment(np.array(TOKENS[:-1]), rows, rows, none, None, rows)
    states = model.forward(model.pack([segment]), model.new_kv_cache(len(rows))).aux_hidden_states
    assert states is not None
    return states


@lru_cache
def draft(head: Path, target: Path) -> DraftTree:
    """The tree behind TOKENS, with the target's features and the noise of its draws."""
    method, dtype = DraftHead(str(head)).method, "float64"
    fuser = DraftHead(str(head), method).build_fuser(str(target), dtype, "cpu")
    features = None
    if fuser is not None:
        features = fuser(states_of(str(target), fuser.aux_hidden_state_layers))
    drafter = DraftHead(str(head), method).build_drafter(str(target), dtype, "cpu", TREE, DraftingConfig(max_kv_tokens=512))
    budget = TreeBudget(TREE.num_draft_tokens, TREE.num_steps)
    (tree,) = drafter.propose([Commit("s", 0, 0, TOKENS, features, NoiseKey(5, 0.9), budget)])
    assert isinstance(tree, DraftTree)
    return tree


@pytest.mark.nightly
def test_tokens_and_acceptance_of_the_demo_stay_the_same(tmp_path: Path) -> None:
    shape = Shape(320, 640, 14, 8, 4, 64, vocab_size=6000, draft_vocab_size=2500)
    folders = write("models/demo/target", ["models/demo/eagle3"], shape, tmp_path, "float32")
    pairs = [("models/demo/target", "models/demo/eagle3"), folders]
    llms = [LLM(str(t), str(h), engine=fixed_config(max_kv_tokens=1024), validate_head="never") for t, h in pairs]
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=7)
        small, wide = (llm.generate("    def __repr__(self):\n", sampling)[0].outputs[0] for llm in llms)
        assert wide.token_ids == small.token_ids
        assert wide.text == small.text
        assert wide.stats.acceptance_length == pytest.approx(small.stats.acceptance_length, rel=0.1)
        assert wide.stats.acceptance_length > 1.5


def test_a_large_checkpoint_takes_little_disk(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "SHARD_BYTES", 10 << 20)
    shape = Shape(512, 2048, 5, 8, 4, 64, vocab_size=48)
    model = widen_target(str(folders / "target"), shape, torch.float32)
    (folder,) = write(str(folders / "target"), [], shape, tmp_path, "float32")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 4
    assert max(file.stat().st_size for file in files) <= 11 << 20
    assert sum(file.stat().st_size for file in files) >= model.nbytes > 70e6
    assert sum(512 * file.stat().st_blocks for file in files) < 2 * model.disk_bytes < 20e6
    load_target(str(folder))


def test_what_cannot_be_widened_is_refused_by_name(folders: Path, tmp_path: Path) -> None:
    target = str(folders / "target")
    for change, reason in (
        ({"hidden": 32}, "hidden size 32 does not fit into 32"),
        ({"intermediate": 63}, "intermediate size 64 does not fit into 63"),
        ({"num_layers": 3}, "4 layers and 48 tokens do not fit into 3 layers"),
        ({"num_kv_heads": 1, "num_heads": 2}, "4 query heads over 2 key-value heads do not fit into 2 over 1"),
        ({"head_dim": 12}, "head width 8 does not divide 12"),
    ):
        with pytest.raises(ConfigError, match=reason):
            write(target, [], replace(WIDE, **change), tmp_path)
    shutil.copytree(folders / "eagle3", tmp_path / "llama")
    shutil.copy(folders / "target" / "config.json", tmp_path / "llama")
    with pytest.raises(CheckpointError, match="has no embeddings; a draft head goes to --draft-model"):
        write(str(tmp_path / "llama"), [], WIDE, tmp_path)
    folder = tmp_path / "normed"
    write_head(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    with pytest.raises(CheckpointError, match="its residual is normed; leave it out, or keep the vocabulary"):
        write(target, [str(folder)], WIDE, tmp_path)
    write(target, [str(folder)], replace(WIDE, vocab_size=0), tmp_path / "kept")
    prefixed = tmp_path / "prefix"
    prefixed.mkdir()
    save_file(tensors_of("hydra-prefix"), prefixed / "model.safetensors")
    (prefixed / "config.json").write_text(json.dumps(config_of("hydra-prefix")))
    with pytest.raises(CheckpointError, match="it has a prefix layer"):
        write(target, [str(prefixed)], WIDE, tmp_path)
    with pytest.raises(ConfigError, match="is there already, or named twice"):
        write(target, [str(folder)], replace(WIDE, vocab_size=0), tmp_path / "kept")


def test_the_command_writes_the_target_and_its_heads(folders: Path, tmp_path: Path) -> None:
    command = typer.Typer()
    command.command()(main)
    options = [str(folders / "target"), "--shape", "60m", "--out", str(tmp_path), "--draft-model", str(folders / "eagle3")]
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
    assert "2 models with" in result.output
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (512, 32000, 8)
    assert json.loads((tmp_path / "eagle3" / "config.json").read_text())["draft_vocab_size"] == 16000
    result = CliRunner().invoke(command, [*options[:1], "--shape", "9b", "--out", str(tmp_path / "other")])
    assert result.exit_code == 1
    assert "unknown shape '9b'; known: 70b, 8b" in str(result.exception)


@pytest.mark.parametrize(("name", "parameters"), [("70b", 70.5e9), ("8b", 8.03e9), ("1b", 1.5e9), ("400m", 0.405e9)])
def test_a_shape_has_the_parameters_of_its_name(name: str, parameters: float) -> None:
    model = widen_target("models/demo/target", SHAPES[name], torch.bfloat16)
    assert model.nbytes / 2 == pytest.approx(parameters, rel=0.02)
