"""Validation finds the wiring of block heads: of a head that knows its tiny target's sequences by heart."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError
from eyas.models.heads.block import BlockHead, block_tensors, load_block_fuser, new_block_head, write_block_head
from eyas.models.heads.block_config import BlockHeadConfig
from eyas.models.heads.validation import observe
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from tests.models.heads.test_block_heads import written
from tests.models.heads.test_head_validation import with_config
from tests.support.tiny import write_target
from tests.support.tiny_block import DSPARK

STEPS = 50


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("validation") / "target"))


@pytest.fixture(scope="module")
def model(target: str) -> TargetModel:
    return load_target(target)


def overfitted(config: BlockHeadConfig, model: TargetModel, target: str) -> BlockHead:
    """A head trained on nothing but the sequences that validation observes."""
    torch.manual_seed(0)
    head, generator = new_block_head(config, target), torch.Generator().manual_seed(0)
    windows = observe(model, target, config.aux_hidden_state_layers)
    tokens, tops = (torch.stack(columns).clone() for columns in zip(*((w.tokens, w.tops) for w in windows), strict=True))
    states = torch.stack(
        [torch.cat([w.hidden_states[i] for i in config.aux_hidden_state_layers], -1) for w in windows]
    ).clone()
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], 5e-3)
    for _ in range(STEPS):
        anchors = 1 + torch.randperm(tokens.shape[1] - config.block_size - 1, generator=generator)[:16].expand(
            len(tokens), -1
        )
        before = (anchors[:, :, None] + torch.arange(config.num_drafted)).flatten(1)
        previous = tokens.gather(1, before).view(*anchors.shape, -1)
        logits = head.block_logits(head(states, tokens, anchors), previous)
        loss = F.cross_entropy(logits.flatten(0, 2), tops.gather(1, before).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


@pytest.fixture(scope="module")
def folder(model: TargetModel, target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found, head = tmp_path_factory.mktemp("heads") / "dspark", overfitted(DSPARK, model, target)
    write_block_head(found, head.config, block_tensors(head))
    return found


def test_a_right_config_is_kept(folder: Path, model: TargetModel, target: str) -> None:
    report = DraftHead(str(folder), "dspark").validate(model, target, "float32", "cpu")
    assert report is not None
    assert report.config_is_right
    assert not report.failed
    assert report.best.first > 3 * report.chance
    assert "the anchor's row predicts the next token" in str(report)


@pytest.mark.parametrize(
    "changes", [{"target_layer_ids": [2, 3]}, {"target_layer_ids": [0, 1], "sample_from_anchor": False}]
)
def test_a_wrong_config_is_corrected(
    changes: dict[str, object], folder: Path, model: TargetModel, target: str, tmp_path: Path
) -> None:
    head = with_config(tmp_path / "head", folder, **changes)
    fuser = load_block_fuser(head, target)
    wiring = DraftHead(head, "dspark").resolve_wiring(model, fuser, target, "float32", "cpu")
    assert wiring == DSPARK.wiring
    assert fuser.aux_hidden_state_layers == wiring.aux_hidden_state_layers == model.aux_hidden_state_layers


def test_a_random_head_is_refused_with_the_numbers(model: TargetModel, target: str, tmp_path: Path) -> None:
    head = written(tmp_path / "head", target)
    report = DraftHead(head, "dspark").validate(model, target, "float32", "cpu")
    assert report is not None
    with pytest.raises(CheckpointError, match=r"the anchor's row predicts nothing.*set validate_head to never"):
        report.require(head)
