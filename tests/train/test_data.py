"""Prepared data: what counts in the loss, how documents are packed, and errors that say what is wrong."""

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from numpy.typing import NDArray

from eyas.config import ServedModel
from eyas.errors import CheckpointError, ConfigError
from eyas.text.chat_template import load_template
from eyas.text.tokenizer import load_tokenizer
from eyas.train import data
from eyas.train.block import draw_anchors
from eyas.train.data import HELDOUT, TRAIN, DocumentReader, prepare, read_prepared
from eyas.train.draft_vocabulary import draft_vocabulary, token_frequencies, vocabulary_coverage
from eyas.train.methods import build_trainer
from eyas.train.windows import Windows
from tests.support.tiny import DEMO, write_spelling_tokenizer, write_target
from tests.support.tiny_block import tiny_block_head
from tests.train.small_runs import prepared, settings, small_disk, tiny_target, write_ids

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
    (((document,), _),) = reader.read([file])
    ids = [token for token, counts in zip(*document, strict=True) if counts]
    return reader.tokenizer.decode(ids)


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
        ([{"prompt": "a"}], r"no row of .*data.jsonl can be used; line 1: no known field: .*, found prompt"),
        ([{"token_ids": [5000]}], "line 1: wrong token_ids: 5000 is not in the vocabulary of 4096"),
    ],
)
def test_data_that_cannot_be_used_are_refused(entries: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(TARGET, [write(tmp_path / "data.jsonl", *entries)], tmp_path / "out", 0.0, 64, 2, 0)


TURN = {"from": "human", "value": "a"}
BAD_ROWS = {
    "no JSON object": ['{"text": ', "[]", "7", '{"a":' * 5000],
    "no UTF-8": [b'{"text": "\xe4"}'],
    "no known field": ["{}", '{"txt": "a b"}', '{"prompt": "a"}'],
    "wrong conversations": [json.dumps({"conversations": turns}) for turns in ("a", ["a"], [{}], [TURN, {"from": "gpt"}])],
    "wrong messages": ['{"messages": [{"role": 5, "content": "a"}]}', '{"messages": [{"role": "user", "content": null}]}'],
    "wrong text": ['{"text": 5}', '{"text": null}', '{"text": "\\ud800"}'],
    "wrong token_ids": ['{"token_ids": [5000]}', '{"token_ids": "5 6"}', '{"token_ids": [1.5]}', '{"token_ids": [true]}'],
    "wrong num_prompt_tokens": ['{"token_ids": [5, 6], "num_prompt_tokens": "x"}'],
    "wrong completion": [json.dumps({"prompt": prompt, "completion": 5}) for prompt in ("a", [TURN])],
}


def write_rows(file: Path, *rows: str | bytes) -> Path:
    file.write_bytes(b"".join((row.encode() if isinstance(row, str) else row) + b"\n" for row in rows))
    return file


def test_rows_that_cannot_be_used_are_counted_by_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = '{"text": "def one(): return 1"}'
    file = write_rows(tmp_path / "data.jsonl", good, "", *(row for rows in BAD_ROWS.values() for row in rows), good)
    info = prepare(TARGET, [file], tmp_path / "out", 0.0, 64, 2, 0)
    assert info.rejected == {reason: len(rows) for reason, rows in BAD_ROWS.items()}
    assert info.num_documents == 2
    assert read_prepared(tmp_path / "out") == info
    named = [record.getMessage() for record in caplog.records]
    assert named[0].startswith(f"{file}, line 3 is left out: no JSON object: ")
    assert sum("no JSON object" in line for line in named) == 3  # the first ones only


def test_a_refusing_chat_template_costs_its_rows_only(tmp_path: Path) -> None:
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('no user') }}{% endif %}" + DROPS_REASONING
    target, good = target_with_template(tmp_path / "target", refuses), {"messages": reasoning_chat("f")}
    file = write(tmp_path / "chats.jsonl", good, {"messages": CHAT[1:]}, good)
    info = prepare(target, [file], tmp_path / "out", 0.0, 64, 1, 0)
    assert (info.num_documents, info.rejected) == (6, {"the chat template refuses the conversation": 1})


USER, ASSISTANT = {"role": "user", "content": "a = 1"}, {"role": "assistant", "content": "b = 2"}
HUMAN, GPT = {"from": "human", "value": "a = 1"}, {"from": "gpt", "value": "b = 2"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "from and value": {"conversations": [HUMAN, GPT]},
    "role and content": {"id": "7", "conversations": [USER, ASSISTANT]},
    "mixed turns": {"conversations": [HUMAN, ASSISTANT]},
    "messages": {"messages": [USER, ASSISTANT]},
    "prompt and completion": {"prompt": [USER], "completion": [ASSISTANT]},
    "prompt and text of the completion": {"prompt": [USER], "completion": ASSISTANT["content"]},
}  # fmt: skip


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_all_layouts_of_conversations_give_one_document(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    rows = list(map(json.dumps, LAYOUTS.values()))
    file.write_text("\n".join(rows) if name.endswith("l") else f"[{', '.join(rows)}]")
    found = [documents for documents, _ in DocumentReader(TARGET, 4096).read([file])]
    assert len(found) == len(LAYOUTS)
    for (ids, mask), *_ in found:
        assert np.array_equal(ids, found[0][0].input_ids)
        assert np.array_equal(mask, found[0][0].loss_mask)


@pytest.mark.parametrize("start", ["\ufeff", " \n\t", "\ufeff\r\n"])
def test_a_list_may_follow_a_mark_or_white_space(start: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.json"
    file.write_text(start + json.dumps([{"text": "a = 1"}, {"text": "b = 2"}], indent=1), encoding="utf-8")
    assert len(list(DocumentReader(TARGET, 4096).read([file]))) == 2


ROWS: dict[str, Callable[[str], dict[str, Any]]] = {
    "token_ids": lambda text: {"token_ids": load_tokenizer(TARGET).encode_batch([text])[0]},
    "text": lambda text: {"text": text},
    "prompt": lambda text: {"prompt": text[:4], "completion": text[4:]},
}


@pytest.mark.parametrize("kind", ROWS)
def test_all_parts_of_a_row_are_in_one_split(kind: str, tmp_path: Path) -> None:
    """Each text is a digit of its own, many times."""
    file = write(tmp_path / "rows.jsonl", *(ROWS[kind](f" = {digit}" * 60) for digit in range(8)))
    info = prepare(TARGET, [file], tmp_path / "out", 0.5, 16, 1, 0)
    assert info.num_documents + info.num_heldout > 3 * 8
    decode = load_tokenizer(TARGET).decode
    digits = {
        split: {char for ids, _ in Windows(tmp_path / "out", 16, split).documents for char in decode(ids.tolist())}
        & set("01234567")
        for split in (TRAIN, HELDOUT)
    }
    assert not digits[TRAIN] & digits[HELDOUT]
    assert digits[TRAIN] | digits[HELDOUT] == set("01234567")


def test_of_prompt_and_completion_the_completion_counts(tmp_path: Path) -> None:
    assert supervised(write(tmp_path / "rows.jsonl", {"prompt": "a = 1\n", "completion": "b = 2"})) == "b = 2"


@pytest.mark.parametrize(("share", "num_lines", "least", "most"), [(0.02, 2000, 8, 8), (0.02, 60, 1, 3), (0.0, 60, 0, 0)])
def test_plain_text_is_held_out_by_document(share: float, num_lines: int, least: int, most: int, tmp_path: Path) -> None:
    """At least eight of the parts of one text, but at most half of them; a share of 0 holds nothing out."""
    (tmp_path / "book.txt").write_text("".join(f"value_{number} = {number}\n" for number in range(num_lines)))
    info = prepare(TARGET, [tmp_path / "book.txt"], tmp_path / "out", share, 128, 2, 0)
    assert least <= info.num_heldout <= min(most, info.num_documents) or (info.num_heldout > 8 and least == 8)
    assert not info.num_heldout or len(Windows(tmp_path / "out", 128, HELDOUT).documents) == info.num_heldout


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"heldout": 1.0}, "heldout is 1.0; it must be 0 or more and below 1"),
        ({"heldout": -0.1}, "heldout is -0.1"),
        ({"heldout": 0.99}, "all 3 documents of .* are held out"),
        ({"max_length": 0}, "max_length is 0; it must be at least 2"),
        ({"min_loss_tokens": 0}, "min_loss_tokens is 0; it must be at least 1"),
    ],
)
def test_settings_that_leave_no_data_are_refused(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    usual = {"heldout": 0.0, "max_length": 64, "min_loss_tokens": 2, "seed": 0}
    with pytest.raises(ConfigError, match=message):
        prepare(TARGET, [write_ids(tmp_path / "ids.jsonl", 3)], tmp_path / "out", **(usual | setting))


def test_token_counts_and_coverage_are_of_training_text(tmp_path: Path) -> None:
    entries = [{"token_ids": [3, *[10 + number] * 8, 5, 5]} for number in range(12)]
    info = prepare(TARGET, [write(tmp_path / "ids.jsonl", *entries)], tmp_path / "data", 0.4, 64, 2, 0)
    assert info.num_heldout
    expected = torch.zeros(4096, dtype=torch.int64)
    for ids, mask in Windows(tmp_path / "data", 64).documents:
        expected += torch.bincount(torch.from_numpy(ids[mask]), minlength=4096)
    assert torch.equal(token_frequencies(tmp_path / "data"), expected)
    draft_ids = draft_vocabulary(tmp_path / "data", 3, 4096)
    assert vocabulary_coverage(tmp_path / "data", draft_ids) == pytest.approx(
        (2 * 8 + 2 * info.num_documents) / expected.sum()
    )
    assert vocabulary_coverage(tmp_path / "data", torch.arange(4096)) == 1


# Shows reasoning in the last turn only, as Qwen3 does.
DROPS_REASONING = """{%- for message in messages -%}
{%- if message.role == 'user' %}Q {{ message.content }}\n{% endif -%}
{%- if message.role == 'assistant' %}A:\n{{ message.content if loop.last else message.content.split('</think>')[-1] }}
{{- '\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}A:\n{% if not enable_thinking | default(true) %}<think></think>{% endif %}{% endif -%}"""
COUNTS_TURNS = "{{ messages | length }} messages\n" + DROPS_REASONING


def target_with_template(folder: Path, template: str) -> str:
    """The demo's target without weights, with another chat template."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def reasoning_chat(name: str) -> list[dict[str, Any]]:
    turns = ((f"{name} one", "<think></think>1"), (f"{name} two", "<think></think>2"), (f"{name} three", "<think></think>3"))
    return [{"role": r, "content": text} for turn in turns for r, text in zip(("user", "assistant"), turn, strict=True)]


@pytest.mark.parametrize("thinks", [True, False])
def test_a_turn_that_a_template_changes_later_is_kept(thinks: bool, tmp_path: Path) -> None:
    """Each turn is learned behind the very prompt that serving has for it."""
    target = target_with_template(tmp_path / "target", DROPS_REASONING)
    variables = {} if thinks else {"enable_thinking": False}
    reader = DocumentReader(target, 4096, variables)
    messages = reasoning_chat("f")
    ((documents, _),) = reader.read([write(tmp_path / "chat.jsonl", {"messages": messages})])
    template = load_template(ServedModel(target, target))
    assert template is not None
    assert (len(documents), reader.num_separate, reader.num_refused) == (3, 2, 0)
    for number, (ids, mask) in zip((2, 0, 1), documents, strict=True):
        first = int(mask.argmax())
        assert mask[first:].all()
        prompt = reader.tokenizer.decode(ids[:first].tolist(), skip_special_tokens=False)
        answer = reader.tokenizer.decode(ids[first:].tolist(), skip_special_tokens=False)
        assert prompt == template.render(messages[: 2 * number + 1], variables)
        assert answer == f"{'<think></think>' if thinks else ''}{number + 1}\n"


def test_turns_that_cannot_be_found_are_counted(tmp_path: Path) -> None:
    reader = DocumentReader(target_with_template(tmp_path / "target", COUNTS_TURNS), 4096)
    ((documents, _),) = reader.read([write(tmp_path / "chat.jsonl", {"messages": reasoning_chat("f")})])
    assert (reader.num_refused, reader.num_separate) == (3, 0)
    assert not any(document.loss_mask.any() for document in documents)


def test_all_turns_of_a_conversation_are_in_one_split(tmp_path: Path) -> None:
    target = target_with_template(tmp_path / "target", DROPS_REASONING)
    names = [f"name{number}" for number in range(12)]
    file = write(tmp_path / "chats.jsonl", *({"messages": reasoning_chat(name)} for name in names))
    info = prepare(target, [file], tmp_path / "data", 0.5, 64, 1, 0, {"enable_thinking": False})
    assert (info.num_separate, info.num_documents + info.num_heldout) == (24, 36)
    assert read_prepared(tmp_path / "data") == info
    texts = {}
    for split in (TRAIN, HELDOUT):
        own = [
            DocumentReader(target, 4096).tokenizer.decode(ids.tolist())
            for ids, _ in Windows(tmp_path / "data", 64, split).documents
        ]
        texts[split] = {name for name in names for text in own if f"{name} one" in text}
    assert not texts[TRAIN] & texts[HELDOUT]
    assert texts[TRAIN] | texts[HELDOUT] == set(names)


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while they are prepared nor while they are read: a token more takes less than a byte more at the peak.

    Counted are Python's memory and that of Arrow.
    """
    arrow = pyarrow.default_memory_pool()
    pools = []  # they outlive their buffers
    tokenizer = load_tokenizer(TARGET)
    monkeypatch.setattr(data, "load_tokenizer", lambda model: tokenizer)  # its peak would hide the others
    monkeypatch.setattr(data, "BATCH_ENTRIES", 4)
    monkeypatch.setattr(data, "WRITER_ROWS", 4)
    monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 16)
    line = json.dumps({"token_ids": [index % 200 for index in range(2000)]}) + "\n"

    def peaks(count: int) -> NDArray[np.int64]:
        (tmp_path / "ids.jsonl").write_text(line * count)
        gc.collect()
        pools.append(pyarrow.proxy_memory_pool(arrow))
        pyarrow.set_memory_pool(pools[-1])
        tracemalloc.start()
        prepare(TARGET, [tmp_path / "ids.jsonl"], tmp_path / f"{count}", 0.0, 500, 2, 0)
        preparing = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        windows = Windows(tmp_path / f"{count}", 256)
        assert sum(len(ids) for ids, _ in windows.documents) == 2000 * count
        reading = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        pyarrow.set_memory_pool(arrow)
        assert pools[-1].max_memory() > 0
        return np.array([preparing, reading, pools[-1].max_memory()])

    prepare(TARGET, [write(tmp_path / "one.jsonl", {"token_ids": [5] * 9})], tmp_path / "one", 0.0, 500, 2, 0)  # imports
    few, many = peaks(8), peaks(40)
    assert (many - few < 32 * 2000).all(), (few, many)


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
    mask = batch.loss_mask & (batch.positions % 3 > 0)  # anchors are supervised, as are their next tokens
    anchors, valid = draw_anchors(replace(batch, loss_mask=mask), 20, 4, seed=1)
    assert valid.any()
    assert set(batch.positions.gather(1, anchors)[valid[..., 0]].remainder(3).tolist()) == {1}


def test_a_reserved_token_in_the_data_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    prepared(tmp_path, target)
    with pytest.raises(ConfigError, match="mask_token_id is 7, which occurs"):
        build_trainer(settings(tmp_path, target, head__mask_token_id=7))


@pytest.mark.parametrize("value", ["x", None, 1.5])
def test_a_reserved_token_that_is_no_id_is_refused(value: object, tmp_path: Path) -> None:
    prepared(tmp_path, tiny_target(tmp_path))
    file = tmp_path / "data" / "prepared.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mask_token_id": value}))
    with pytest.raises(ConfigError, match="no token id"):
        read_prepared(tmp_path / "data")


def test_the_reserved_token_ends_no_turn(tmp_path: Path) -> None:
    """Neither the end of a text nor that of a turn, which only generation_config.json names in some models."""
    target = tiny_target(tmp_path)
    reserved = prepared(tmp_path, target).mask_token_id
    assert reserved >= 0
    (Path(target) / "generation_config.json").write_text(json.dumps({"eos_token_id": [reserved]}))
    assert prepared(tmp_path, target).mask_token_id != reserved


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


def test_a_full_disk_keeps_what_was_prepared(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    info, more = prepared(tmp_path, target), write_ids(tmp_path / "more.jsonl", 200)
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    with small_disk(4096), pytest.raises(ConfigError, match=r"cannot write to .*data: .*nothing that was saved is lost"):
        prepare(target, [more], tmp_path / "data", 0.0, 64, 2, 0)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == names
    assert read_prepared(tmp_path / "data") == info
    assert len(Windows(tmp_path / "data", 64).documents) == info.num_documents


def test_a_missing_file_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        prepare(tiny_target(tmp_path), [tmp_path / "none.jsonl"], tmp_path / "data", 0.0, 64, 2, 0)


def test_a_binary_file_is_no_plain_text(tmp_path: Path) -> None:
    (tmp_path / "book.parquet").write_bytes(b"PAR1" + bytes(90))
    with pytest.raises(ConfigError, match="zero bytes, so it is no text"):
        prepare(TARGET, [tmp_path / "book.parquet"], tmp_path / "out", 0.1, 128, 2, 0)


def test_conversations_need_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: no chat template"):
        prepare(tiny_target(tmp_path), [write(tmp_path / "chat.jsonl", {"messages": CHAT})], tmp_path / "out", 0.0, 64, 2, 0)
