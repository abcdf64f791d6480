"""Training text: `prepare` makes token ids and loss masks of files; `Windows` packs them for training, in a seeded order.

Files are JSON Lines with `messages` (role, content), `conversations` (from, value: ShareGPT), `text` or `token_ids`, or
plain text. In conversations only the assistant's words count in the loss. A prepared folder holds the splits `train` and
`heldout` of the `datasets` library, `token_freq.safetensors` and `prepared.json`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.chat_template import ChatTemplate, load_template
from eyas.config import ServedModel
from eyas.datastore import excluded_ends
from eyas.errors import CheckpointError, ConfigError, InvalidRequest
from eyas.tokenizer import Tokenizer, load_tokenizer

INFO_FILE, FREQUENCY_FILE = "prepared.json", "token_freq.safetensors"
TRAIN, HELDOUT = "train", "heldout"
FOLDER_SUFFIXES = {".jsonl", ".txt", ".md", ".py", ".rst"}
# Marks of entries that `eyas train regenerate` did not answer; each has the reason.
FAILED, SKIPPED = "error", "skipped"
UNANSWERED = {FAILED, SKIPPED}
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class Document(NamedTuple):
    """Token ids of a text, and whether each counts in the loss."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class Prepared:
    """What `prepared.json` says. num_refused: turns of assistants that the template changes, and so cannot be found."""

    model: str
    vocab_size: int
    sources: tuple[str, ...]
    num_documents: int
    num_heldout: int
    num_tokens: int
    num_supervised: int
    num_skipped: int
    num_refused: int
    seed: int


def prepare(
    model: str, files: Sequence[Path], out: Path, heldout: float, max_length: int, min_loss_tokens: int, seed: int
) -> Prepared:
    """Write a prepared folder. heldout: share of documents kept out of training.

    Longer documents are cut into parts of max_length. Those with fewer supervised tokens than min_loss_tokens are left out.
    Raises ConfigError for files without usable text, for chats of a model without a template, and for a full disk.
    """
    from datasets import Dataset, disable_progress_bars
    from safetensors.torch import save_file

    from eyas.models.checkpoint import read_target_config, resolve

    if not sys.stderr.isatty():
        disable_progress_bars()
    vocab_size = int(read_target_config(resolve(model))["vocab_size"])
    reader = DocumentReader(model, vocab_size)
    generator = np.random.default_rng(seed)
    splits: dict[str, dict[str, list[list[int]]]] = {name: {"input_ids": [], "loss_mask": []} for name in (TRAIN, HELDOUT)}
    counts, num_skipped = torch.zeros(vocab_size, dtype=torch.int64), 0
    for document in reader.read(files):
        if sum(document.loss_mask) < min_loss_tokens:
            num_skipped += 1
            continue
        split = splits[HELDOUT if generator.random() < heldout else TRAIN]
        for start in range(0, len(document.input_ids), max_length):
            mask = document.loss_mask[start : start + max_length]
            split["input_ids"].append(document.input_ids[start : start + max_length])
            split["loss_mask"].append([int(flag) for flag in mask])
        ids = torch.tensor(document.input_ids)[torch.tensor(document.loss_mask)]
        counts += torch.bincount(ids, minlength=vocab_size)
    train = splits[TRAIN]["input_ids"]
    if not train:
        raise ConfigError(_why_empty(files, num_skipped, min_loss_tokens, reader))
    info = Prepared(
        model, vocab_size, tuple(map(str, files)), len(train), len(splits[HELDOUT]["input_ids"]),
        sum(map(len, train)), sum(map(sum, splits[TRAIN]["loss_mask"])), num_skipped + reader.num_unanswered,
        reader.num_refused, seed,
    )  # fmt: skip
    try:
        for name, columns in splits.items():
            Dataset.from_dict(columns).save_to_disk(str(out / name))
        save_file({"token_freq": counts}, out / FREQUENCY_FILE)
        (out / INFO_FILE).write_text(json.dumps(asdict(info), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the prepared data to {out}: {error}; free space or name another folder") from error
    return info


def _why_empty(files: Sequence[Path], num_skipped: int, least: int, reader: DocumentReader) -> str:
    names = ", ".join(map(str, files)) or "no files"
    if num_skipped:
        refused = f"; the chat template changes the text of {reader.num_refused} turns" if reader.num_refused else ""
        return (
            f"no document of {names} has {least} supervised tokens: {num_skipped} were left out{refused}; only turns of the "
            "assistant are supervised, so that conversations need one"
        )
    return f"{names}: no text to train on; give JSON Lines with messages, conversations, text or token_ids, or plain text"


class DocumentReader:
    """Reads files into documents. num_refused: see Prepared. num_unanswered: entries that `regenerate` could not answer."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self.num_refused = self.num_unanswered = 0
        self._model, self._vocab_size = model, vocab_size
        self._tokenizer: Tokenizer = load_tokenizer(model)
        self._template: ChatTemplate | None = None

    def read(self, files: Iterable[Path]) -> Iterator[Document]:
        """Yield the documents of all files. Raises ConfigError that names file and line."""
        for file in files:
            for number, entry in read_entries(file):
                if UNANSWERED & entry.keys():
                    self.num_unanswered += 1
                    continue
                try:
                    yield self._document(entry)
                except (InvalidRequest, KeyError, TypeError, ValueError, AttributeError) as error:
                    raise ConfigError(f"{file}, line {number}: {error}") from error

    def _document(self, entry: Mapping[str, Any]) -> Document:
        if messages := messages_of(entry):
            return self._conversation(messages)
        if "token_ids" in entry:
            ids = [int(token) for token in entry["token_ids"]]
            if not all(0 <= token < self._vocab_size for token in ids):
                raise ValueError(f"token_ids holds {max(ids)}, but {self._model} has a vocabulary of {self._vocab_size}")
            free = int(entry.get("num_prompt_tokens", 1))
            return Document(ids, [index >= free for index in range(len(ids))])
        if "text" not in entry:
            raise ValueError(f"no messages, conversations, text or token_ids, but {', '.join(entry) or 'nothing'}")
        ids = list(self._tokenizer.encode(str(entry["text"])))
        return Document(ids, [index > 0 for index in range(len(ids))])

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> Document:
        """The rendered chat. An assistant's words are what its turn adds to the chat and generation prompt before it."""
        if self._template is None:
            self._template = load_template(ServedModel(self._model, self._model))
        if self._template is None:
            raise ConfigError(f"{self._model} has no chat template, but the data are conversations; give plain text instead")
        text = self._template.render(messages, {"add_generation_prompt": False})
        spans = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant" or index == 0:
                continue
            before = self._template.render(messages[:index], {})
            after = self._template.render(messages[: index + 1], {"add_generation_prompt": False})
            if text.startswith(before) and text.startswith(after):
                spans.append((len(before), len(after)))
            else:
                self.num_refused += 1
        encoded = self._tokenizer.tokenizer.encode(text, add_special_tokens=False)
        mask = [any(start <= begin < end for start, end in spans) for begin, _ in encoded.offsets]
        return Document(list(encoded.ids), mask)


def expand_files(paths: Sequence[Path], exclude: Path | None = None) -> list[Path]:
    """Files as they are, and the sources and texts of folders, in the order of their names.

    exclude: see `excluded_ends`. Raises ConfigError for a path that does not exist.
    """
    ends = excluded_ends(exclude)
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; name files or folders of training text")
        found = sorted(file for file in path.rglob("*") if file.suffix in FOLDER_SUFFIXES) if path.is_dir() else [path]
        files += [file for file in found if not str(file.absolute()).endswith(ends)]
    return files


def messages_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a conversation, as chat templates take them; empty if the entry is none."""
    if "messages" in entry:
        return [dict(message) for message in entry["messages"]]
    turns = entry.get("conversations") or ()
    return [{"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]


def read_entries(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file with their line numbers, or one with the text of any other file."""
    try:
        if file.suffix not in (".jsonl", ".json"):
            yield 1, {"text": file.read_text(encoding="utf-8", errors="replace")}
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise ConfigError(f"{file}, line {number}: expected an object, found a {type(entry).__name__}")
                    yield number, entry
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read {file}: {error}; give JSON Lines, one object on each line") from error


@dataclass(frozen=True)
class Batch:
    """Windows of packed documents: tokens, documents and positions int64 [N, L], loss_mask bool [N, L].

    documents: number of each position's document within the window; -1 is padding. positions: within the document.
    index: numbers of the windows. draws: how many windows of the run came before each; they seed what is random.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    index: tuple[int, ...] = ()
    draws: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        tokens, loss_mask = self.tokens.to(device), self.loss_mask.to(device)
        return Batch(tokens, loss_mask, self.documents.to(device), self.positions.to(device), self.index, self.draws)

    def random(self, seed: int, *shape: int) -> Tensor:
        """Uniform values in [0, 1), float32 [N, *shape]; those of a window are the same in any batch and process."""
        generators = (torch.Generator().manual_seed(seed * 1_000_003 + draw) for draw in self.draws or self.index)
        values = torch.stack([torch.rand(shape, generator=generator) for generator in generators])
        return values.to(self.tokens.device)

    @property
    def is_packed(self) -> bool:
        """Whether a window holds more than one document, or padding."""
        return bool((self.documents != 0).any())


class Windows:
    """The windows of a split. Documents stay whole where they fit; the packing depends on length and order alone."""

    def __init__(self, folder: Path, max_length: int, split: str = TRAIN) -> None:
        """Raises ConfigError for a folder that `eyas train prepare` did not write."""
        from datasets import load_from_disk

        self.info = read_prepared(folder)
        try:
            data: Any = load_from_disk(str(folder / split)).with_format("numpy")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {folder / split}: {error}; run `eyas train prepare` again") from error
        self.documents = [
            (np.asarray(ids, np.int64), np.asarray(mask, bool))
            for ids, mask in zip(data["input_ids"], data["loss_mask"], strict=True)
        ]
        self.max_length = max_length
        self.packs = _pack([len(ids) for ids, _ in self.documents], max_length)

    def __len__(self) -> int:
        return len(self.packs)

    @cached_property
    def digest(self) -> str:
        """Of all that windows hold, in their order; what was computed of other windows does not fit these."""
        found = hashlib.sha256(f"{self.max_length}".encode())
        for ids, mask in self.documents:
            found.update(ids.tobytes() + mask.tobytes())
        return found.hexdigest()[:16]

    def batch(self, indices: Sequence[int], draws: Sequence[int] = ()) -> Batch:
        """The windows of these numbers. draws: see Batch."""
        shape = (len(indices), self.max_length)
        tokens, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        positions, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for row, index in enumerate(indices):
            at = 0
            for number, (document, start) in enumerate(self.packs[index]):
                ids, flags = (column[start : start + self.max_length] for column in self.documents[document])
                place = slice(at, at + len(ids))
                tokens[row, place], mask[row, place] = ids, flags
                documents[row, place], positions[row, place] = number, np.arange(len(ids))
                mask[row, at] = False  # nothing before it predicts it
                at += len(ids)
        arrays = [torch.from_numpy(array) for array in (tokens, mask, documents, positions)]
        return Batch(arrays[0], arrays[1], arrays[2], arrays[3], tuple(indices), tuple(draws))

    def order(self, seed: int, epoch: int) -> Tensor:
        """The order of the windows in an epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(len(self), generator=generator)

    def step_batch(self, seed: int, step: int, batch_size: int, rank: int = 0, num_ranks: int = 1) -> Batch:
        """The windows of a process in a pass. All processes together take the windows that one alone would take."""
        first = (step * num_ranks + rank) * batch_size
        numbers = range(first, first + batch_size)
        orders = {epoch: self.order(seed, epoch) for epoch in {number // len(self) for number in numbers}}
        return self.batch([int(orders[number // len(self)][number % len(self)]) for number in numbers], numbers)


def _pack(lengths: Sequence[int], size: int) -> list[list[tuple[int, int]]]:
    """(document, start) of what each window holds: parts of `size` of long documents, then first fit in order of length."""
    packs: list[list[tuple[int, int]]] = []
    rests: list[tuple[int, int, int]] = []
    for document, length in enumerate(lengths):
        starts = range(0, length, size)
        for start in starts:
            if length - start >= size:
                packs.append([(document, start)])
            elif length - start > 1:
                rests.append((length - start, document, start))
    free: dict[int, list[int]] = {}
    for length, document, start in sorted(rests, key=lambda rest: (-rest[0], rest[1])):
        room = min((room for room, open_packs in free.items() if room >= length and open_packs), default=None)
        if room is None:
            packs.append([])
            pack, room = len(packs) - 1, size
        else:
            pack = free[room].pop()
        packs[pack].append((document, start))
        free.setdefault(room - length, []).append(pack)
    return packs


def read_prepared(folder: Path) -> Prepared:
    """What was prepared. Raises ConfigError."""
    try:
        settings = json.loads((folder / INFO_FILE).read_text())
        return Prepared(**{**settings, "sources": tuple(settings["sources"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{str(folder)!r} holds no prepared data ({error}); run `eyas train prepare` first") from error


def token_frequencies(folder: Path) -> Tensor:
    """How often each token is supervised, int64 [V]."""
    from safetensors.torch import load_file

    return load_file(folder / FREQUENCY_FILE)["token_freq"]


def draft_vocabulary(folder: Path, size: int, vocab_size: int) -> Tensor:
    """Ids of the most frequent supervised tokens, ascending, int64 [size]; all if size is 0. Raises ConfigError."""
    if not size or size == vocab_size:
        return torch.arange(vocab_size)
    if size > vocab_size:
        raise ConfigError(f"head.draft_vocab_size is {size}, but the target's vocabulary is {vocab_size}")
    return token_frequencies(folder).topk(size).indices.sort().values


def check_mask_token(windows: Windows, mask_token_id: int) -> None:
    """Raises ConfigError if the reserved token occurs in the data: its embedding must mean nothing else."""
    places = sum(int((ids == mask_token_id).sum()) for ids, _ in windows.documents)
    if places:
        raise ConfigError(
            f"head.mask_token_id is {mask_token_id}, which occurs {places} times in the data; name an id that never does"
        )


def check_prepared(windows: Windows, model: str, vocab_size: int) -> None:
    """Raises for data of another vocabulary, and for data without a supervised token."""
    if windows.info.vocab_size != vocab_size:
        raise CheckpointError(
            f"the data were prepared for {windows.info.model} with a vocabulary of {windows.info.vocab_size}, but {model} "
            f"has {vocab_size}; prepare them for this model"
        )
    if not len(windows) or not any(bool(mask.any()) for _, mask in windows.documents):
        raise ConfigError("the data hold no supervised token; prepare conversations with turns of the assistant, or text")
