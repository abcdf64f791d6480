"""A draft head's folder is opened once, whatever is built from it."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from eyas import LLM
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads import validation
from tests.support.tiny import fixed_config

INDEX = "model.safetensors.index.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file has been read as text."""
    counts, read_text = Counter[str](), Path.read_text

    def count(path: Path, *args: Any, **options: Any) -> str:
        counts[str(path)] += 1
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", count)
    return counts


def indexed(head: str, folder: Path) -> str:
    """Copy a head, with an index of its tensors as large checkpoints have it."""
    shutil.copytree(head, folder)
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as tensors:
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors.keys(), file.name)}))
    return str(folder)


def test_all_that_is_built_of_a_head_reads_its_folder_once(
    tiny_target: str, tiny_head: str, tmp_path: Path, reads: Counter[str]
) -> None:
    head, target = DraftHead(indexed(tiny_head, tmp_path / "head")), Checkpoint(tiny_target)
    assert head.method == "eagle3"
    assert head.resolve_tree(TreeConfig(8)).num_steps == 5
    assert head.features_fingerprint()
    assert head.build_fuser(target, "float32", "cpu") is not None
    head.build_drafter(target, "float32", "cpu", TreeConfig(8, 2, 2), DraftingConfig(max_kv_tokens=64))
    assert [reads[f"{head.path}/{name}"] for name in ("config.json", INDEX)] == [1, 1]
    assert reads[f"{tiny_target}/config.json"] == 1


def test_an_llm_reads_the_folder_of_its_head_once(
    tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that checks the head too, on little text."""
    monkeypatch.setattr(validation, "MAX_WINDOWS", 3)
    head = indexed("models/demo/eagle3", tmp_path / "head")
    with LLM("models/demo/target", draft_model=head, engine=fixed_config(max_kv_tokens=256)):
        assert [reads[f"{head}/{name}"] for name in ("config.json", INDEX)] == [1, 1]
