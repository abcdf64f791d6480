"""Training text: `prepare` makes token ids and loss masks of files, in a folder that `StoredDocuments` reads.

Files are JSON Lines, or a JSON list, with `messages` or `conversations` (role and content, or from and value), `prompt`
and `completion`, `text` or `token_ids`; or plain text. In conversations only the assistant's words count in the loss. A row
that cannot be used is counted by its reason. A prepared folder holds the splits `train` and `heldout` of the `datasets`
library, `token_freq.safetensors` and `prepared.json`.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.config import ServedModel
from eyas.config.checks import at_least, require
from eyas.config.file_values import read_json
from eyas.errors import ConfigError, InvalidRequest
from eyas.models.checkpoint import Checkpoint, resolve
from eyas.text.chat_template import ChatTemplate, load_template
from eyas.text.rows import FIELDS, JSON_SUFFIXES, BadRow, check_text, text_of, token_ids_of, usable_rows
from eyas.text.tokenizer import Tokenizer, load_tokenizer

INFO_FILE, FREQUENCY_FILE = "prepared.json", "token_freq.safetensors"
TRAIN, HELDOUT = "train", "heldout"
FOLDER_SUFFIXES = {".jsonl", ".txt", ".md", ".py", ".rst"}
# Marks of entries that `eyas train regenerate` did not answer; each has the reason.
FAILED, SKIPPED = "error", "skipped"
UNANSWERED = {FAILED, SKIPPED}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
# Documents that are held out at least, unless that is more than half of them.
MIN_HELDOUT = 8
# What is in memory at a time: entries, characters of their texts, and parts on their way to disk.
BATCH_ENTRIES, BATCH_CHARACTERS, WRITER_ROWS = 256, 1 << 20, 256


class Document(NamedTuple):
    """Token ids of a text, int64 [n], and whether each counts in the loss, bool [n]."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


class Entry(NamedTuple):
    """The documents of a row. are_together: whether they and their parts belong in one split; not in a plain-text file."""

    documents: list[Document]
    are_together: bool


class RenderedText(NamedTuple):
    """A text to encode.

    Attributes:
        spans: the characters that count in the loss; None marks plain text, which counts whole.
        is_chat: whether a chat template made it, with its special tokens.
    """

    text: str
    spans: tuple[tuple[int, int], ...] | None = None
    is_chat: bool = False


@dataclass(frozen=True)
class Prepared:
    """Content of `prepared.json`.

    Attributes:
        num_refused: turns of assistants that cannot be found in the rendered chat, and so do not count in the loss.
        num_separate: turns that are documents of their own, because the template shows them differently in a longer chat.
        chat_template_kwargs: variables that the chats were rendered with.
        rejected: rows that cannot be used, by reason.
        mask_token_id: a token that never occurs, for heads with rows of a reserved token; -1 if every token occurs.
    """

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
    num_separate: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    mask_token_id: int = -1


def prepare(  # noqa: PLR0913  # options of `eyas train prepare`
    model: str, files: Sequence[Path], out: Path, heldout: float, max_length: int, min_loss_tokens: int, seed: int,
    chat_template_kwargs: Mapping[str, Any] | None = None, show: Callable[[int], object] = lambda _: None,
) -> Prepared:  # fmt: skip
    """Write a prepared folder, in batches of documents.

    Raises ConfigError for settings out of range, files without usable text, chats without a template, and a full disk.

    Args:
        heldout: share of documents kept out of training; see `_held_out`.
        max_length: tokens at which longer documents are cut; a part without a supervised token is left out.
        min_loss_tokens: supervised tokens below which a document is left out.
        show: called with the number of rows read so far.
        chat_template_kwargs: as `LLM.chat` takes them.
    """
    from datasets import Dataset, disable_progress_bars
    from safetensors.torch import save_file

    from eyas.config.file_values import get_setting
    from eyas.train.features import keeping_saved

    require(0 <= heldout < 1, f"heldout is {heldout}; it must be 0 or more and below 1, because the rest is trained on")
    at_least(2, max_length=max_length)
    at_least(1, min_loss_tokens=min_loss_tokens)
    disable_progress_bars()
    vocab_size = get_setting(int, Checkpoint(model).text_config, "vocab_size", model)
    reader = DocumentReader(model, vocab_size, chat_template_kwargs or {})
    with keeping_saved(out):
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out) as name:
            folder = Path(name)
            whole = folder / "all.arrow"
            written = _write_documents(reader.read(files), whole, vocab_size, max_length, min_loss_tokens, show)
            is_held = _held_out(written.group_sizes, heldout, seed)
            if is_held.all():
                raise ConfigError(_why_empty(files, written.num_skipped, min_loss_tokens, reader, len(is_held)))
            for split, rows in ((TRAIN, ~is_held), (HELDOUT, is_held)):
                Dataset.from_file(str(whole)).select(np.flatnonzero(rows)).save_to_disk(str(folder / split))
            train = StoredDocuments(folder, TRAIN)
            token_freq = np.zeros(vocab_size, np.int64)
            for ids, mask in train:
                np.add.at(token_freq, ids[mask], 1)
            info = Prepared(
                model, vocab_size, tuple(map(str, files)), len(train), int(is_held.sum()), int(train.lengths.sum()),
                int(token_freq.sum()), written.num_skipped + reader.num_unanswered, reader.num_refused, seed,
                reader.num_separate, dict(chat_template_kwargs or {}), dict(reader.rejected),
                reader.unused_token(written.occurs),
            )  # fmt: skip
            save_file({"token_freq": torch.from_numpy(token_freq)}, folder / FREQUENCY_FILE)
            (folder / INFO_FILE).write_text(json.dumps(asdict(info), indent=1) + "\n")
            (out / INFO_FILE).unlink(missing_ok=True)
            for split in (TRAIN, HELDOUT):  # a run that reads the older ones keeps them
                shutil.rmtree(out / split, ignore_errors=True)
            for part in (TRAIN, HELDOUT, FREQUENCY_FILE, INFO_FILE):
                (folder / part).replace(out / part)
    return info


class WrittenDocuments(NamedTuple):
    """What a file of documents holds.

    Attributes:
        group_sizes: how many documents, one after the other, belong in one split, int64 [G].
        occurs: whether each token is in a document, bool [V].
        num_skipped: documents with too few supervised tokens, which it does not hold.
    """

    group_sizes: NDArray[np.int64]
    occurs: NDArray[np.bool_]
    num_skipped: int


def _write_documents(
    entries: Iterable[Entry],
    file: Path,
    vocab_size: int,
    max_length: int,
    min_loss_tokens: int,
    show: Callable[[int], object],
) -> WrittenDocuments:
    """Write the parts of documents to an Arrow file; see `prepare`."""
    from datasets import Features, Value
    from datasets import Sequence as ListOf
    from datasets.arrow_writer import ArrowWriter

    sizes = list[int]()
    occurs = np.zeros(vocab_size, np.bool_)
    num_skipped = 0
    columns = Features({"input_ids": ListOf(Value("int32")), "loss_mask": ListOf(Value("int8"))})
    with ArrowWriter(path=str(file), features=columns, writer_batch_size=WRITER_ROWS) as writer:
        for number, (documents, are_together) in enumerate(entries, 1):
            used = [document for document in documents if document.loss_mask.sum() >= min_loss_tokens]
            num_skipped += len(documents) - len(used)
            parts = [part for document in used for part in _cut(document, max_length)]
            for ids, mask in parts:
                writer.write({"input_ids": ids.astype(np.int32), "loss_mask": mask.astype(np.int8)})
                occurs[ids] = True
            sizes += [len(parts)] if are_together else [1] * len(parts)
            show(number)
        writer.finalize()
    return WrittenDocuments(np.array(sizes, np.int64), occurs, num_skipped)


def _why_empty(files: Sequence[Path], num_skipped: int, least: int, reader: DocumentReader, num_heldout: int) -> str:
    names = ", ".join(map(str, files)) or "no files"
    if num_heldout:
        return f"all {num_heldout} documents of {names} are held out, none is left to train on; lower heldout, or add text"
    if num_skipped:
        refused = f"; the chat template changes the text of {reader.num_refused} turns" if reader.num_refused else ""
        return (
            f"no document of {names} has {least} supervised tokens: {num_skipped} were left out{refused}; only turns of the "
            "assistant are supervised, so that conversations need one"
        )
    if reader.num_unanswered:
        return f"none of the {reader.num_unanswered} entries of {names} was answered; they hold the reasons"
    return f"{names}: no text to train on; give JSON Lines with {FIELDS}; or plain text"


def _cut(document: Document, max_length: int) -> Iterator[Document]:
    """Yield the parts of a document that have supervised tokens."""
    for start in range(0, len(document.input_ids), max_length):
        mask = document.loss_mask[start : start + max_length]
        if mask.any():
            yield Document(document.input_ids[start : start + max_length], mask)


def _held_out(sizes: NDArray[np.int64], share: float, seed: int) -> NDArray[np.bool_]:
    """Return which documents are held out: a seeded share of the groups, whose sizes [G] are given; of few documents at
    least MIN_HELDOUT, but for these at most half.
    """
    is_held = np.random.default_rng(seed).random(len(sizes)) < share
    if share:
        held = sizes[is_held].sum()
        half = sizes.sum() // 2
        for group in np.random.default_rng([seed, 1]).permutation(np.flatnonzero(~is_held)):
            if held < MIN_HELDOUT and held + sizes[group] <= half:
                is_held[group] = True
                held += sizes[group]
    return np.repeat(is_held, sizes)


class DocumentReader:
    """Reader of files into documents. num_refused, num_separate: see Prepared.

    chat_template_kwargs: variables of the chat template, such as enable_thinking. num_unanswered: entries that `regenerate`
    could not answer. rejected: rows that cannot be used, by reason; the log names the first of each.
    """

    def __init__(self, model: str, vocab_size: int, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.num_refused = self.num_separate = self.num_unanswered = 0
        self._model, self._vocab_size, self._variables = model, vocab_size, dict(chat_template_kwargs or {})
        self.rejected: Counter[str] = Counter()
        self.tokenizer: Tokenizer = load_tokenizer(model)

    def unused_token(self, occurs: NDArray[np.bool_]) -> int:
        """Choose a token that never occurs, see Prepared. occurs: bool [V].

        The padding token comes first, then ids without a text, then special tokens, then others; of each kind the last,
        where vocabularies keep what they reserve. The ends of texts and turns are no choice: they occur while serving.
        """
        tokenizer = self.tokenizer.tokenizer
        added = tokenizer.get_added_tokens_decoder()
        special = {token for token, entry in added.items() if entry.special}
        config = Checkpoint(self._model).text_config
        file = resolve(self._model) / "generation_config.json"
        stated = (config, read_json(file) if file.is_file() else {})
        ends = {token for own in stated for key in ("bos_token_id", "eos_token_id") for token in _ids(own.get(key))}
        free = [int(token) for token in np.flatnonzero(~occurs) if int(token) not in ends]
        padding = set(_ids(config.get("pad_token_id")))
        return max(
            free,
            key=lambda token: (token in padding, tokenizer.id_to_token(token) is None, token in special, token),
            default=-1,
        )

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return load_template(ServedModel(self._model, self._model))

    def read(self, files: Iterable[Path]) -> Iterator[Entry]:
        """Yield the documents of each row; a conversation may have several. Raises ConfigError for a file without any."""
        entries: list[tuple[list[RenderedText | Document], bool]] = []
        num_characters = 0
        for file in files:
            for texts in usable_rows(file, self._texts, self.rejected):
                entries.append((texts, file.suffix in JSON_SUFFIXES))
                num_characters += sum(len(text[0]) for text in texts)
                if len(entries) >= BATCH_ENTRIES or num_characters >= BATCH_CHARACTERS:
                    yield from self._encoded(entries)
                    entries, num_characters = [], 0
        yield from self._encoded(entries)

    def _texts(self, entry: Mapping[str, Any]) -> list[RenderedText | Document] | None:
        """Return the texts of a row; None if it was not answered. Raises BadRow."""
        if UNANSWERED & entry.keys():
            self.num_unanswered += 1
            return None
        texts: list[RenderedText | Document] = []
        if messages := messages_of(entry):
            texts += self._conversation(messages)
        elif "token_ids" in entry:
            texts.append(self._given_ids(entry))
        elif (prompt := prompt_of(entry)) is not None:
            text = prompt + entry["completion"]
            texts.append(RenderedText(text, ((len(prompt), len(text)),)))
        else:
            texts.append(RenderedText(text_of(entry)))
        for text in texts:
            if isinstance(text, RenderedText):
                check_text(text.text)
        return texts

    def _given_ids(self, entry: Mapping[str, Any]) -> Document:
        ids, start = token_ids_of(entry, self._vocab_size), entry.get("num_prompt_tokens", 1)
        if type(start) is not int or start < 0:
            raise BadRow(f"wrong num_prompt_tokens: {start!r} is no whole number from 0")
        return Document(ids, np.arange(len(ids)) >= start)

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[RenderedText]:
        """Return the rendered chat. An assistant's words are what its turn adds to the chat and generation prompt before it.

        Some templates show a turn differently once others follow, such as without its reasoning. What the model wrote is the
        turn behind its own prefix, so that such a turn is a text of its own.
        """
        if self._template is None:
            raise BadRow(f"no chat template: {self._model} has none, and the row is a conversation; give plain text instead")
        try:
            return self._rendered(self._template, messages)
        except InvalidRequest as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from error

    def _rendered(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[RenderedText]:
        closed = self._variables | {"add_generation_prompt": False}
        text = template.render(messages, closed)
        spans, separate = [], []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = template.render(messages[:index], self._variables) if index else None
            after = template.render(messages[: index + 1], closed)
            if before is None or not after.startswith(before):
                self.num_refused += 1
            elif text.startswith(after):
                spans.append((len(before), len(after)))
            else:
                separate.append(RenderedText(after, ((len(before), len(after)),), is_chat=True))
        self.num_separate += len(separate)
        return ([RenderedText(text, tuple(spans), is_chat=True)] if spans or not separate else []) + separate

    def _encoded(self, entries: Sequence[tuple[Sequence[RenderedText | Document], bool]]) -> Iterator[Entry]:
        """Encode the texts of these rows, on all cores. With each row goes whether its documents stay together."""
        texts = [text for entry, _ in entries for text in entry if isinstance(text, RenderedText)]
        plain = iter(self.tokenizer.encode_batch([text.text for text in texts if text.spans is None]))
        rendered = {
            is_chat: iter(self.tokenizer.tokenizer.encode_batch(marked, add_special_tokens=not is_chat) if marked else ())
            for is_chat in (False, True)
            for marked in [[text.text for text in texts if text.spans is not None and text.is_chat == is_chat]]
        }
        for entry, are_together in entries:
            documents = []
            for text in entry:
                if isinstance(text, Document):
                    documents.append(text)
                elif text.spans is None:
                    ids = np.array(next(plain), np.int64)
                    documents.append(Document(ids, np.arange(len(ids)) > 0))
                else:
                    encoded = next(rendered[text.is_chat])
                    begins, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T  # those of a BOS token are equal
                    inside = [(start <= begins) & (begins < end) & (begins < ends) for start, end in text.spans]
                    mask = np.any(inside, axis=0) if inside else np.zeros(len(begins), bool)
                    documents.append(Document(np.array(encoded.ids, np.int64), mask))
            yield Entry(documents, are_together)


def _ids(value: object) -> list[int]:
    """Return the token ids of a setting that holds one, several or none."""
    return [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]


def messages_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a conversation, as chat templates take them; empty if the row is none.

    Each turn has role and content, or from and value as ShareGPT has them. A `prompt` of messages goes on with its
    `completion`, which is messages too, or the text of the assistant's turn. Raises BadRow.
    """
    name = next((name for name in ("messages", "conversations") if entry.get(name) is not None), "")
    turns = entry[name] if name else []
    if not name and isinstance(entry.get("prompt"), list):
        name = "prompt"
        turns = [*entry["prompt"], *_completion_turns(entry.get("completion"))]
    if not isinstance(turns, list):
        raise BadRow(f"wrong {name}: expected a list of messages, found a {type(turns).__name__}")
    return [_message(name, number, turn) for number, turn in enumerate(turns, 1)]


def _completion_turns(completion: object) -> list[object]:
    """Return what follows a prompt of messages. Raises BadRow for a completion that is neither messages nor a text."""
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    if isinstance(completion, list) or completion is None:
        return completion or []
    raise BadRow(f"wrong completion: expected a list of messages or a text, found a {type(completion).__name__}")


def _message(name: str, number: int, turn: object) -> dict[str, Any]:
    """Return a turn as a chat template takes it; raises BadRow."""
    if not isinstance(turn, dict):
        raise BadRow(f"wrong {name}: message {number} is a {type(turn).__name__}; expected an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or not role:
        raise BadRow(f"wrong {name}: message {number} has no role (or from)")
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, str | list) and not (content is None and turn.get("tool_calls")):
        raise BadRow(f"wrong {name}: message {number} has no content (or value)")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return rest | {"role": SHAREGPT_ROLES.get(role, role), "content": content}


def prompt_of(entry: Mapping[str, Any]) -> str | None:
    """Return the prompt of a row of prompt and completion in plain text; None if it is none. Raises BadRow."""
    if "prompt" not in entry or "completion" not in entry:
        return None
    for name in ("prompt", "completion"):
        if not isinstance(entry[name], str):
            raise BadRow(f"wrong {name}: expected a text, found a {type(entry[name]).__name__}")
    return str(entry["prompt"])


class StoredDocuments(Sequence[Document]):
    """The documents of a split, read from memory-mapped files when they are asked for. lengths: in tokens, int64 [N]."""

    def __init__(self, folder: Path, split: str = TRAIN) -> None:
        """Raises ConfigError for a folder that `eyas train prepare` did not write."""
        from datasets import load_from_disk

        try:
            data: Any = load_from_disk(str(folder / split))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {folder / split}: {error}; run `eyas train prepare` again") from error
        self._columns = [self._chunks(data.data.column(name)) for name in ("input_ids", "loss_mask")]
        counts = [len(offsets) - 1 for offsets, _ in self._columns[0]]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        lengths = [np.diff(offsets).astype(np.int64) for offsets, _ in self._columns[0]]
        self.lengths: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *lengths])

    @staticmethod
    def _chunks(column: Any) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the offsets and values of a column's lists, without a copy. List i: values[offsets[i] : offsets[i + 1]]."""
        return [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in column.chunks if len(chunk)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: Any) -> Any:
        """Return the document of a number."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = int(np.searchsorted(self._firsts, number, side="right")) - 1
        at = number - self._firsts[part]
        ids, mask = (values[offsets[at] : offsets[at + 1]] for offsets, values in (own[part] for own in self._columns))
        return Document(ids.astype(np.int64), mask.astype(bool))


def read_prepared(folder: Path) -> Prepared:
    """Return what was prepared. Raises ConfigError."""
    try:
        settings = json.loads((folder / INFO_FILE).read_text())
        found = Prepared(**{**settings, "sources": tuple(settings["sources"])})
        if not all(type(value) is int for name, value in vars(found).items() if name.startswith("num_")):
            raise ValueError(f"{INFO_FILE} holds counts that are no whole numbers")
        if type(found.mask_token_id) is not int:
            raise ValueError(f"{INFO_FILE} has the mask_token_id {found.mask_token_id!r}, which is no token id")
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{str(folder)!r} holds no prepared data ({error}); run `eyas train prepare` first") from error
