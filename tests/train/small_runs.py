"""Small training runs over a tiny target, for tests."""

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eyas.config.loader import validated
from eyas.train.config import HEAD_SETTINGS, LOSS_SETTINGS, TrainConfig
from eyas.train.data import Prepared, prepare
from eyas.train.trainer import Trainer
from tests.support.tiny import write_spelling_tokenizer, write_target

MASK = 2
HEAD = {
    "num_hidden_layers": 1, "target_layer_ids": [0, 2], "block_size": 4, "markov_rank": 8, "mask_token_id": MASK,
    "num_heads": 2,
}  # fmt: skip
LOSS = {"num_anchors": 8, "ttt_steps": 2, "num_depths": 3, "chunk_rows": 16, "noise": 0}
READ = {"head": HEAD_SETTINGS, "loss": LOSS_SETTINGS}


def tiny_target(folder: Path) -> str:
    target = write_target(folder / "target")
    write_spelling_tokenizer(target)
    return str(target)


def write_ids(file: Path, count: int, lengths: Sequence[int] = (24,), seed: int = 0) -> Path:
    """Documents of random tokens without the reserved ones, of these lengths in turn."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, 48, (count, max(lengths)), generator=generator).tolist()
    cut = [row[: lengths[number % len(lengths)]] for number, row in enumerate(rows)]
    file.write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in cut))
    return file


def prepared(folder: Path, target: str, count: int = 20, lengths: Sequence[int] = (24,)) -> Prepared:
    file = write_ids(folder / "ids.jsonl", count, lengths)
    return prepare(target, [file], folder / "data", heldout=0.2, max_length=64, min_loss_tokens=2, seed=0)


def read_by(method: str, **changes: Any) -> dict[str, Any]:
    """Of changes as `settings` takes them, those that a method reads."""
    return {
        key: value
        for key, value in changes.items()
        if (table := READ.get(key.partition("__")[0])) is None or key.partition("__")[2] in table[method]  # type: ignore[index]
    }


def settings(folder: Path, target: str, method: str = "dspark", **changes: Any) -> TrainConfig:
    data: dict[str, Any] = {
        "model": target, "out": str(folder / "run"), "method": method, "device": "cpu", "log_every": 1, "save_every": 2,
        "data": {"path": str(folder / "data"), "max_length": 32},
        "head": {key: value for key, value in HEAD.items() if key in HEAD_SETTINGS[method]},  # type: ignore[index]
        "loss": {key: value for key, value in LOSS.items() if key in LOSS_SETTINGS[method]},  # type: ignore[index]
        "optimizer": {"batch_size": 2, "max_steps": 4, "precision": "fp32", "learning_rate": 1e-3},
        "eval": {"every": 1000, "num_prompts": 2, "prompt_tokens": 6, "max_tokens": 6, "num_draft_tokens": 6},
    }  # fmt: skip
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            data[part][name] = value
        else:
            data[part] = value
    return validated(TrainConfig, data, "test")


def loss(trainer: Trainer) -> float:
    """The loss of all windows with the same anchors."""
    batch = trainer.windows.batch(range(len(trainer.windows)))
    with torch.no_grad():
        return float(trainer.trainee(batch, trainer.source.states(batch), 0, "kl")["loss"])


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond these bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
