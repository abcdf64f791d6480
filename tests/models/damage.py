"""Damages every value, every tensor and every file of a checkpoint, one at a time, and says what Eyas may do with each."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.config.file_values import CONFIG_VALUES, TEXT, TOKENIZER_VALUES

LEFT_OUT = object()
VALUES: dict[str, Any] = {
    "a text": "many", "negative": -1, "zero": 0, "huge": 10**12, "NaN": math.nan, "null": None, "left out": LEFT_OUT,
    "an empty text": "", "an empty list": [], "an empty object": {}, "a list": [1], "true": True, "a fraction": 1.5,
    "lists in lists": [[1], {"a": 1}], "half a surrogate pair": "\ud800", "infinite": math.inf, "beyond all floats": 10**400,
    "two lines with a NUL": "a\nb\0", "a template that does not compile": "{{",
}  # fmt: skip
# Tensors of a head that the target's replace, or that are one instance with others (the later blocks of a Medusa head).
REPLACEABLE = ("lm_head.weight", "embed_tokens.weight", "t2d", ".1.linear.weight", ".1.linear.bias")


# Files that a checkpoint may lack.
OPTIONAL_FILES = ("generation_config.json", "tokenizer_config.json", "chat_template.json", "special_tokens_map.json")
SHARD = "model-00001-of-00001.safetensors"
SHARD_NAMES: tuple[Any, ...] = (
    "../model.safetensors", "/etc/passwd", "a\0b.safetensors", "", "..", "long" * 2000, "\ud800", "config.json", 7, None,
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """A damage to a copy of a checkpoint. key: of the value or tensor. may_differ: whether another result is right too."""

    label: str
    key: str
    apply: Callable[[Path], None]
    may_differ: bool = False


def damages(folder: Path) -> list[Damage]:
    """All damages to the files of a checkpoint."""
    found: list[Damage] = []
    for file in sorted(folder.glob("*.json")):
        found += [*_damaged_file(file.name), *_damaged_text(file.name)]
        if file.name != "tokenizer.json":  # its reader is a library's
            found += _damaged_values(file)
    for file in sorted(folder.glob("*.safetensors")):
        found += [*_damaged_file(file.name), *_damaged_tensors(file), *_damaged_indexes(file)]
    return found


def damaged(folder: Path, damage: Damage, into: Path) -> Path:
    """A damaged copy."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(folder, into)
    damage.apply(into)
    return into


def _damaged_file(name: str) -> Iterator[Damage]:
    yield Damage(f"{name} is empty", name, lambda folder: write(folder / name, b""))
    yield Damage(f"{name} is cut", name, lambda folder: write(folder / name, (folder / name).read_bytes()[:-40]))
    yield Damage(f"{name} is garbage", name, lambda folder: write(folder / name, b"\x93garbage\x00" * 20))
    yield Damage(f"{name} is a folder", name, partial(_replace_by_folder, name), may_differ=name in OPTIONAL_FILES)
    yield Damage(f"{name} is a link to nothing", name, partial(_replace_by_link, name), may_differ=name in OPTIONAL_FILES)


def _replace_by_folder(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def _replace_by_link(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("nothing")


def _damaged_text(name: str) -> Iterator[Damage]:
    for label, content in {
        "a list": b"[1, 2]", "a number": b"7", "no JSON": b"{'a': 1}", "nested too deeply": b'{"a":' * 99_999 + b"1",
        "in another encoding": '{"model_type": "llama", "vocab_size": 48}'.encode("utf-16"),
        "in Latin-1": '{"model_type": "lläma"}'.encode("latin-1"),
        "an object after a byte order mark": b"\xef\xbb\xbf{}",
        "a number of 5000 digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    }.items():  # fmt: skip
        yield Damage(f"{name} is {label}", name, partial(_write, name, content))
    yield Damage(f"{name} says vocab_size twice", "vocab_size", partial(_twice, name), may_differ=name != "config.json")


def _write(name: str, content: bytes, folder: Path) -> None:
    write(folder / name, content)


def _twice(name: str, folder: Path) -> None:
    text = (folder / name).read_text()
    write(folder / name, text.replace("{", '{"vocab_size": 7, "vocab_size": 8,', 1).encode())


def write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _damaged_values(file: Path) -> Iterator[Damage]:
    for path, value in _paths(json.loads(file.read_text())):
        for label, wrong in VALUES.items():
            if wrong is not LEFT_OUT and type(wrong) is type(value) and wrong == value:
                continue
            known = {**CONFIG_VALUES, **TOKENIZER_VALUES, "content": TEXT}.get(path[-1])
            is_left_out = wrong is None or wrong is LEFT_OUT
            may_differ = is_left_out or (known is not None and known.holds(wrong))
            name = f"{file.name}: {'.'.join(path)} is {label}"
            yield Damage(name, path[-1], partial(_change, file.name, path, wrong), may_differ)


def _paths(config: dict[str, Any], within: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        yield (*within, key), value
        if isinstance(value, dict):
            yield from _paths(value, (*within, key))


def _change(name: str, path: tuple[str, ...], value: Any, folder: Path) -> None:
    config = json.loads((folder / name).read_text())
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1])
    if value is not LEFT_OUT:
        inner[path[-1]] = value
    (folder / name).write_text(json.dumps(config))


def _damaged_tensors(file: Path) -> Iterator[Damage]:
    for name in load_file(file):
        changes: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
            "left out": lambda tensor: None,
            "whole numbers": lambda tensor: tensor.to(torch.int32),
            "floating-point numbers": lambda tensor: tensor.to(torch.float32),
            "a row longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
            "a row shorter": lambda tensor: tensor[:-1],
            "without rows": lambda tensor: tensor[:0],
            "one number": lambda tensor: tensor.flatten()[0].clone(),
            "NaN": lambda tensor: tensor.float() * math.nan,
            "huge": lambda tensor: torch.full_like(
                tensor, torch.iinfo(torch.int64).max if tensor.dtype == torch.int64 else 1
            ),
        }
        for label, change in changes.items():
            may_differ = label == "huge" or (label == "left out" and name.endswith(REPLACEABLE))
            may_differ |= label == "NaN" and ".experts." in name  # a check pass does not meet every expert
            yield Damage(f"{name} is {label}", name, partial(_replace, file.name, name, change), may_differ)
    for extra in (
        "extra.weight",
        "layers.99999999.self_attn.q_proj.weight",
        "99999999.0.linear.weight",
        "rotary_emb.inv_freq",
        "two\nlines",
        "long" * 500,
    ):
        yield Damage(f"{extra[:40]} is there too", extra, partial(_add, file.name, extra))


def _damaged_indexes(file: Path) -> Iterator[Damage]:
    """An index that gives one tensor a wrong file, or lacks it."""
    for name in (*SHARD_NAMES, LEFT_OUT):
        label = f"an index has {'no file' if name is LEFT_OUT else repr(name)[:40]} for a tensor"
        yield Damage(label, "weight_map", partial(_write_index, file.name, name))
    yield Damage("a shard is missing", SHARD, partial(_lose_shard, file.name))


def _write_index(file: str, name: Any, folder: Path) -> None:
    """Move the weights into one shard, and give its index a wrong name for the first tensor."""
    tensors = sorted(load_file(folder / file))
    (folder / file).rename(folder / SHARD)
    weights = {**dict.fromkeys(tensors, SHARD), tensors[0]: name}
    if name is LEFT_OUT:
        del weights[tensors[0]]
    write(folder / f"{file}.index.json", json.dumps({"metadata": {}, "weight_map": weights}).encode())


def _lose_shard(file: str, folder: Path) -> None:
    _write_index(file, SHARD, folder)
    (folder / SHARD).unlink()


def _replace(file: str, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], folder: Path) -> None:
    tensors = load_file(folder / file)
    new = change(tensors.pop(name))
    if new is not None:
        tensors[name] = new
    save_file(tensors, folder / file, {"format": "pt"})


def _add(file: str, name: str, folder: Path) -> None:
    save_file({**load_file(folder / file), name: torch.ones(4, 4)}, folder / file, {"format": "pt"})
