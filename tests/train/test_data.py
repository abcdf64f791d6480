"""Prepared data: what counts in the loss, how documents are packed, and errors that say what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.errors import CheckpointError, ConfigError
from eyas.train.block import draw_anchors
from eyas.train.data import DocumentReader, Windows, prepare
from eyas.train.methods import build_trainer
from tests.tiny import DEMO, write_spelling_tokenizer, write_target
from tests.tiny_block import tiny_block_head
from tests.train.small_runs import prepared, settings, tiny_target, write_ids

TARGET = str(DEMO / "target")
CHAT = [
    {"role": "user", "content": "def one():"}, {"role": "assistant", "content": "return 1"},
    {"role": "user", "content": "def two():"}, {"role": "assistant", "content": "return 2"},
]  # fmt: skip


def write(file: Path, *entries: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def supervised(file: Path) -> str:
    reader = DocumentReader(TARGET, 4096)
    (document,) = reader.read([file])
    ids = [token for token, counts in zip(*document, strict=True) if counts]
    return reader._tokenizer.decode(ids)


def test_only_the_assistants_words_count_in_both_layouts(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[message["role"]], "value": message["content"]} for message in CHAT]
    one = supervised(write(tmp_path / "messages.jsonl", {"messages": CHAT}))
    two = supervised(write(tmp_path / "sharegpt.jsonl", {"conversations": sharegpt}))
    assert one == two
    assert "return 1" in one
    assert "return 2" in one
    assert "def" not in one


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "no text to train on"),
        ([{"messages": CHAT[:1]}], "conversations need one"),
        ([{"prompt": "a"}], "line 1: no messages, conversations, text or token_ids, but prompt"),
        ([{"token_ids": [5000]}], "line 1: token_ids holds 5000"),
    ],
)
def test_data_that_cannot_be_used_are_refused(entries: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(TARGET, [write(tmp_path / "data.jsonl", *entries)], tmp_path / "out", 0.0, 64, 2, 0)


def test_conversations_need_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(tiny_target(tmp_path), [write(tmp_path / "chat.jsonl", {"messages": CHAT})], tmp_path / "out", 0.0, 64, 2, 0)


def test_windows_hold_every_document_whole_once(tmp_path: Path) -> None:
    prepared(tmp_path, tiny_target(tmp_path), count=9)
    windows = Windows(tmp_path / "data", 64)
    batch = windows.batch(range(len(windows)))
    rows = [
        row[numbers == number].tolist()
        for row, numbers in zip(batch.tokens, batch.documents, strict=True)
        for number in range(int(numbers.max()) + 1)
    ]
    assert sorted(rows) == sorted(ids.tolist() for ids, _ in windows.documents)
    assert len(windows) < len(rows)
    assert not batch.loss_mask[batch.positions == 0].any()


def test_anchors_and_their_depths_stay_in_a_document(tmp_path: Path) -> None:
    prepared(tmp_path, tiny_target(tmp_path), count=9)
    batch = Windows(tmp_path / "data", 64).batch([0, 1])
    anchors, valid = draw_anchors(batch, 20, 4, seed=1)
    own = batch.documents.gather(1, anchors)
    assert (batch.positions.gather(1, anchors) > 0).logical_or(~valid[..., 0]).all()
    for depth in range(4):
        at = (anchors + 1 + depth).clamp(max=63)
        same = (batch.documents.gather(1, at) == own) & (anchors + 1 + depth < 64) & batch.loss_mask.gather(1, at)
        assert (same | ~valid[..., depth]).all()
    assert valid.any()
    assert torch.equal(draw_anchors(batch, 20, 4, seed=1)[0], anchors)


def test_a_reserved_token_in_the_data_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    prepared(tmp_path, target)
    with pytest.raises(ConfigError, match="mask_token_id is 7, which occurs"):
        build_trainer(settings(tmp_path, target, head__mask_token_id=7))


def test_data_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    prepare(TARGET, [write_ids(tmp_path / "ids.jsonl", 5)], tmp_path / "data", 0.0, 64, 2, 0)
    with pytest.raises(CheckpointError, match="vocabulary of 4096"):
        build_trainer(settings(tmp_path, target))


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    head = tiny_block_head("dspark", target)
    narrow = write_target(tmp_path / "narrow", hidden=16)
    write_spelling_tokenizer(narrow)
    prepared(tmp_path, str(narrow))
    with pytest.raises(CheckpointError, match="hidden size 32, but this target has 16"):
        build_trainer(settings(tmp_path, str(narrow), draft_model=head))


def test_a_full_disk_is_named_before_data_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def full(data: object, folder: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", full)
    with pytest.raises(ConfigError, match="cannot write the prepared data"):
        prepared(tmp_path, tiny_target(tmp_path))
