"""Whatever is wrong in a checkpoint's files ends in an error of Eyas in one line, in a warning, or changes nothing."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.config import DraftingConfig, ServedModel, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.errors import EyasError
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.text.chat_template import load_template, special_tokens
from eyas.text.tokenizer import load_tokenizer
from tests.models.damage import Damage, damaged, damages
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.tiny import write_eagle1_head, write_head, write_spelling_tokenizer, write_target
from tests.support.tiny_block import tiny_block_head, tiny_peagle_head
from tests.support.tiny_medusa_hydra import tiny_heads

# Damages of each checkpoint that a test of every day tries.
SAMPLE = 25
MANY = 300
MAX_MESSAGE = 1000
TREE = TreeConfig(num_draft_tokens=10, num_steps=2, top_k=3)
TOKENIZERS = ("tokenizer",)
HEADS = ("eagle2", "eagle3", "peagle", "dspark", "dflash2", "medusa", "hydra")
TARGETS = ("llama", "gemma-3", "phi-3", "mixtral")
# One checkpoint of each reader.
DAILY = ("llama", "eagle3", "dspark", "hydra", *TOKENIZERS)

Result = list[Any]


def target_result(folder: Path) -> Result:
    """End tokens, and the logits of a short text."""
    target = load_target(str(folder))
    rows, none = np.arange(5), np.zeros(0, dtype=np.int64)
    packed = target.pack([Segment(rows + 3, rows, rows, none, None, rows)])
    return [sorted(target.eos_ids), target.forward(packed, target.new_kv_cache(5)).logits.tolist()]


def head_result(method: str, target: str, folder: Path) -> Result:
    """The tree of a head on features that its fuser makes of even states."""
    fuser = DraftHead(str(folder), method).build_fuser(target, "float32", "cpu")
    assert fuser is not None
    states = torch.linspace(-1, 1, 2 * fuser.state_width).view(2, -1)
    drafter = DraftHead(str(folder), method).build_drafter(target, "float32", "cpu", TREE, DraftingConfig(64))
    with torch.inference_mode():
        commit = Commit("a", 0, 0, (5, 6, 7), fuser(states), NoiseKey(0), TreeBudget(10, 2))
        (tree,) = drafter.propose([commit])
    assert isinstance(tree, DraftTree)
    return [list(tree.tokens), list(tree.parents), [round(score, 4) for score in tree.log_probs]]


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer with every setting that Eyas reads, one of each form."""
    folder.mkdir()
    write_spelling_tokenizer(folder)
    settings = {
        "bos_token": {"content": "<bos>"}, "add_bos_token": True, "eos_token": "<eos>", "unk_token": "<eos>",
        "pad_token": "<pad>", "sep_token": "<eos>", "cls_token": {"content": "<bos>"}, "mask_token": "<pad>",
        "chat_template": [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return folder


def tokenizer_result(folder: Path) -> Result:
    """A prompt, its text, the special tokens, and a chat."""
    tokenizer, template = load_tokenizer(str(folder)), load_template(ServedModel("m", str(folder)))
    ids = tokenizer.encode("ab12")
    chat = template.render([{"role": "user", "content": "ab"}], {}) if template else None
    return [list(ids), tokenizer.decode(ids), special_tokens(str(folder)), chat]


def write_checkpoint(name: str, folder: Path) -> tuple[Path, Callable[[Path], Result]]:
    """A checkpoint, and what reads it."""
    if name in TOKENIZERS:
        return write_tokenizer(folder / name), tokenizer_result
    if name in TARGETS:
        kind, settings = FAMILIES.get(name, ("llama", {"num_hidden_layers": 2}))
        return Path(write_model(folder / name, config_of(kind, **settings))), target_result
    target = str(write_target(folder / "target"))
    eagle3 = str(write_head(folder / "eagle3"))
    path = {
        "eagle2": lambda: write_eagle1_head(folder / "eagle2"),
        "eagle3": lambda: eagle3,
        "peagle": lambda: tiny_peagle_head(eagle3),
        "medusa": lambda: tiny_heads("medusa", target),
        "hydra": lambda: tiny_heads("hydra-prefix", target),
    }.get(name, lambda: tiny_block_head(name, target))()
    return Path(path), lambda folder: head_result(name, target, folder)


def fault(
    result: Callable[[], Result], expected: Result, damage: Damage, folder: Path, log: pytest.LogCaptureFixture
) -> str:
    """What is wrong with what happens to a damaged checkpoint; empty if nothing is."""
    log.clear()
    try:
        found = result()
    except EyasError as error:
        text = str(error)
        own = [record.getMessage() for record in log.records if record.levelno >= logging.ERROR]
        if "\n" in text or len(text) > MAX_MESSAGE:
            return f"an error of several lines, or of {len(text)} characters: {text}"
        if own:
            return f"code of Eyas fails on it: {text}"
        return "" if folder.name in text else f"names no file: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    warned = any(record.levelno == logging.WARNING and record.name.startswith("eyas") for record in log.records)
    if damage.may_differ or warned or same(found, expected):
        return ""
    return "another result without a word"


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == pytest.approx(expected, abs=1e-4)) if isinstance(expected, float) else found == expected


def faults(name: str, count: int, folder: Path, log: pytest.LogCaptureFixture) -> dict[str, str]:
    """All that goes wrong with some damages of a checkpoint, which are the same in every run."""
    (folder / "whole").mkdir()
    whole, read = write_checkpoint(name, folder / "whole")
    expected, found = read(whole), {}
    for damage in random.Random(name).sample(all_damages := damages(whole), min(count, len(all_damages))):
        broken = damaged(whole, damage, folder / f"broken-{name}")
        if wrong := fault(lambda broken=broken: read(broken), expected, damage, broken, log):  # type: ignore[misc]
            found[damage.label] = wrong
    return found


@pytest.mark.parametrize("name", DAILY)
def test_a_damaged_file_is_named_or_does_no_harm(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not faults(name, SAMPLE, tmp_path, caplog)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*TARGETS, *HEADS, *TOKENIZERS])
def test_many_damaged_files_are_named_or_do_no_harm(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All damages of heads, tokenizers and one target; many of the other targets."""
    assert not faults(name, MANY if name in TARGETS[1:] else 10_000, tmp_path, caplog)
