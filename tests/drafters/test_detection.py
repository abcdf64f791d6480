"""The method and the depth of trees follow the checkpoint; a method that does not fit it is refused by name."""

import json
from pathlib import Path

import pytest
import torch

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError
from eyas.models.heads.block import block_tensors, write_block_head
from eyas.models.heads.block_config import Dialect
from tests.support.checkpoint_formats import CHECKPOINT_FORMATS, TINY, random_tensors
from tests.support.tiny import write_checkpoint, write_small
from tests.support.tiny_block import KINDS, random_block_head, tiny_block_head, tiny_peagle_head
from tests.support.tiny_medusa_hydra import tiny_heads

DEMO = Path("models/demo")
OF_DEMO = {
    "eagle1": "eagle2", "eagle3": "eagle3", "eagle3-full": "eagle3", "dspark": "dspark", "medusa": "medusa",
    "hydra": "hydra", "small": "sps",
}  # fmt: skip


def built(method: str, target: str, head: str) -> object:
    return DraftHead(head, method).build_drafter(target, "float32", "cpu", TreeConfig(), DraftingConfig(max_kv_tokens=256))


@pytest.mark.parametrize("name", OF_DEMO)
def test_the_demo_checkpoints_show_their_methods(name: str) -> None:
    assert DraftHead(str(DEMO / name)).method == OF_DEMO[name]
    assert DraftHead(str(DEMO / name), "lookahead").method == "lookahead"


def test_without_a_checkpoint_nothing_is_drafted() -> None:
    assert DraftHead("").method == "none"


@pytest.mark.parametrize("name", CHECKPOINT_FORMATS)
def test_every_format_of_eagle_heads_is_detected(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, *CHECKPOINT_FORMATS[name](TINY, random_tensors(TINY)))
    assert DraftHead(folder).method == "eagle3"


@pytest.mark.parametrize("kind", ["dspark", "dflash", "dflash2"])
@pytest.mark.parametrize("dialect", ["author", "specforge", "speculators"])
def test_every_format_of_block_heads_is_detected(kind: str, dialect: Dialect, tiny_target: str, tmp_path: Path) -> None:
    head = random_block_head(kind, tiny_target)
    write_block_head(tmp_path, head.config, block_tensors(head), dialect)
    assert DraftHead(str(tmp_path)).method == kind
    assert DraftHead(str(tmp_path), kind).resolve_tree(TreeConfig()).num_steps == KINDS[kind].block_size


def test_other_checkpoints_are_detected(tiny_target: str, tiny_head: str, tmp_path: Path) -> None:
    assert DraftHead(tiny_peagle_head(tiny_head)).method == "peagle"
    assert DraftHead(f"{tiny_head}/eagle1").method == "eagle2"
    assert DraftHead(write_small(tiny_target)).method == "sps"
    for kind in ("medusa", "hydra"):
        assert DraftHead(tiny_heads(kind, tiny_head)).method == kind
    (tmp_path / "datastore.json").write_text("{}")
    assert DraftHead(str(tmp_path)).method == "rest"


def test_a_checkpoint_without_marks_asks_for_the_method(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"architectures": ["Unheard"]}, {"some.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="does not show which drafting method it is for; name the method"):
        _ = DraftHead(str(tmp_path)).method


@pytest.mark.parametrize("asked", ["eagle3", "eagle2", "peagle", "dflash", "medusa", "hydra", "sps", "eagle3+lookahead"])
def test_a_method_of_another_checkpoint_is_refused_by_name(asked: str, tiny_target: str) -> None:
    folder = tiny_block_head("dspark", tiny_target)
    with pytest.raises(CheckpointError, match=r"is for the method dspark \(a draft head of DSpark\), not for") as error:
        built(asked, tiny_target, folder)
    assert "set the method to dspark, or leave it out" in str(error.value)
    with pytest.raises(CheckpointError, match="is for the method dspark"):
        DraftHead(folder, asked).build_fuser(tiny_target, "float32", "cpu") or built(asked, tiny_target, folder)


def test_both_methods_of_eagle_1_take_its_heads(tiny_target: str, tiny_head: str) -> None:
    for method in ("eagle1", "eagle2"):
        assert built(method, tiny_target, f"{tiny_head}/eagle1")
    with pytest.raises(CheckpointError, match="is for the method eagle2"):
        built("eagle3", tiny_target, f"{tiny_head}/eagle1")
    with pytest.raises(CheckpointError, match="is for the method peagle"):
        built("eagle3", tiny_target, tiny_peagle_head(tiny_head))


def test_trees_are_as_deep_as_a_head_drafts(tiny_target: str, tiny_head: str) -> None:
    folder = tiny_block_head("dspark", tiny_target)
    open_tree = TreeConfig(num_draft_tokens=12)
    assert DraftHead(folder, "dspark").resolve_tree(open_tree) == TreeConfig(12, 4)
    assert DraftHead(folder, "dspark+prompt_lookup").resolve_tree(open_tree) == TreeConfig(12, 11)
    assert DraftHead(folder, "dspark").resolve_tree(TreeConfig(12, 2)) == TreeConfig(12, 2)
    assert (
        DraftHead(tiny_head, "eagle3").resolve_tree(open_tree)
        == DraftHead("", "none").resolve_tree(open_tree)
        == TreeConfig(12, 5)
    )
    peagle = Path(tiny_peagle_head(tiny_head))
    assert DraftHead(str(peagle), "peagle").resolve_tree(open_tree) == TreeConfig(12, 7)


def test_a_peagle_head_may_state_its_depth(tiny_head: str, tmp_path: Path) -> None:
    source = Path(tiny_peagle_head(tiny_head))
    config = json.loads((source / "config.json").read_text())
    methods = {"proposal_methods": [{"speculative_tokens": 3}]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "speculators_config": methods}))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert DraftHead(str(tmp_path), "peagle").resolve_tree(TreeConfig()).num_steps == 3
