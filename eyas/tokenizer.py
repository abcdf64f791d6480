"""Text to token ids, and token ids to text as they come.

The text of a stream does not depend on how its tokens are grouped into chunks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.errors import CheckpointError

_INCOMPLETE = "\ufffd"
# An incomplete character is at most 3 bytes long, and so are at most 3 tokens; more than this many are not all one.
_MAX_TAIL = 3
_MAX_PENDING = 8


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a local folder or hub id. Raises CheckpointError if there is none or it is damaged.

    Truncation and padding that are stored with it are for training; prompts are encoded whole.
    """
    file = fetch_file(source, "tokenizer.json")
    if file is None:
        raise CheckpointError(f"no tokenizer.json in {source!r}; give a folder or a hub id that holds one")
    tokenizer = _parsed(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = tokenizer_settings(source)
    bos = settings.get("bos_token")
    content = bos["content"] if isinstance(bos, dict) else bos
    return Tokenizer(tokenizer, tokenizer.token_to_id(content) if content and settings.get("add_bos_token") else None)


class Tokenizer:
    """Encodes and decodes. bos is put in front of every prompt that does not begin with it; None adds nothing.

    tokenizer: that of the `tokenizers` library.
    is_byte_level: whether the vocabulary writes each byte of a text as a character of its own.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, bos: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._bos = bos
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.is_byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self._longest = max(len(token.encode()) for token in tokenizer.get_vocab())

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without encoding the text."""
        return len(text.encode()) // self._longest

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, special tokens added."""
        return self._with_bos(text, self._encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """As `encode` of each text, on all cores."""
        encoded = self.tokenizer.encode_batch_fast(list(texts))
        return [self._with_bos(text, tuple(encoding.ids)) for text, encoding in zip(texts, encoded, strict=True)]

    def _with_bos(self, text: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if self._bos is None or not text or ids[:1] == (self._bos,) else (self._bos, *ids)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt that holds its special tokens already, as chat templates write them."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a text while other threads run: `encode` of the library keeps the interpreter lock, a batch does not."""
        encoding, *_ = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def bad_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as token ids, as given and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(self._encode(text, add_special_tokens=False) for text in texts))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, special tokens left out unless they are asked for."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Ids of those of the names that are special tokens of the vocabulary."""
        return frozenset(id_ for name in names if (id_ := self.tokenizer.token_to_id(name)) is not None) & self._special

    def is_special(self, token: int) -> bool:
        """Whether a token, such as end-of-sequence, has no text."""
        return token in self._special


@dataclass(frozen=True)
class TextPiece:
    """The text that a chunk of tokens released.

    texts: for each token, the text that it made safe to show; tokens after the end of a stop string do not count.
    stopped: whether a stop string was found.
    """

    texts: tuple[str, ...]
    stopped: bool

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class TextStream:
    """Turns tokens into text as they come. Text that may become part of a stop string or of a character is held back.

    stop_string: the stop string that ended the stream; None before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        kept_tokens: Collection[int] = (),
    ) -> None:
        """The stream ends at any of the `stop` strings that begins after the text of `min_tokens` tokens.

        kept_tokens: special tokens that stay in the text, unless they end the output.
        include_stop: keep the stop string that ends the text; and, if special tokens are not skipped, the one that ends
            the output.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self.stop_string: str | None = None
        self._skips_special = skip_special_tokens
        self._includes_stop = include_stop
        self._kept = frozenset(kept_tokens)
        self._num_unsearched = min_tokens
        self._held = ""
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int], ends: bool = False) -> TextPiece:
        """Take the next tokens. After `stopped`, the stream must not be used again.

        ends: whether the last of the tokens ended the output.
        """
        texts: list[str] = []
        for number, token in enumerate(token_ids, 1):
            text = self._decode(token, ends and number == len(token_ids))
            if self._num_unsearched > 0:
                self._num_unsearched -= 1
                texts.append(text)
                continue
            found = self._release(text)
            if found is not None:
                return TextPiece((*texts, found), stopped=True)
            texts.append(self._safe())
        return TextPiece(tuple(texts), stopped=False)

    def flush(self) -> str:
        """The text still held back when the tokens have ended; cut at a stop string that it completes."""
        found = self._release(self._text() if self._pending else "")
        rest, self._held = self._held, ""
        return rest if found is None else found

    def _release(self, text: str) -> str | None:
        """Append `text`; return what is held up to the first stop string, or None if there is none."""
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        at, self.stop_string = min(found)
        return self._held[: at + len(self.stop_string) * self._includes_stop]

    def _safe(self) -> str:
        """Take the held text up to the longest tail that begins a stop string."""
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _decode(self, token: int, ends: bool) -> str:
        """The text that `token` completes, decoded with as much context as it needs; empty while a character is incomplete.

        `tokenizers.decoders.DecodeStream` does the same, but fails for good once invalid UTF-8 changes text that is already
        out, and cannot return its rest.
        """
        is_end = ends and not self._includes_stop
        if (is_end or self._skips_special) and self._tokenizer.is_special(token):
            return "" if is_end or token not in self._kept else self._before_kept() + self._plain([token], False)
        self._pending.append(token)
        text = self._text()
        if not text or text.endswith(_INCOMPLETE):
            return self._settle(text) if len(self._pending) >= _MAX_PENDING else ""
        self._context, self._pending = self._pending, []
        return text

    def _before_kept(self) -> str:
        """Release the text of an incomplete character: a special token ends it."""
        text = self._text() if self._pending else ""
        self._context, self._pending = self._pending or self._context, []
        return text

    def _settle(self, text: str) -> str:
        """Release the text before the last tokens, cut between characters: invalid bytes would be held back for ever."""
        for cut in range(len(self._pending) - _MAX_TAIL, len(self._pending)):
            tail = self._plain(self._pending[cut:])
            before = text.removesuffix(tail)
            if before + tail == text and before == self._text(cut):
                self._context, self._pending = self._pending[:cut], self._pending[cut:]
                return before
        return ""

    def _text(self, num_tokens: int | None = None) -> str:
        """Of the first pending tokens, or of all."""
        pending = self._pending[:num_tokens]
        before = self._plain(self._context)
        both = self._plain(self._context + pending)
        return both[len(before) :] if both.startswith(before) else self._plain(pending)

    def _plain(self, ids: Sequence[int], skips_special: bool | None = None) -> str:
        return self._tokenizer.decode(ids, self._skips_special if skips_special is None else skips_special)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _parsed(file: Path) -> HuggingFaceTokenizer:
    try:
        return HuggingFaceTokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{file} is damaged: {error}; fetch it again") from error


def tokenizer_settings(source: str) -> dict[str, Any]:
    """The content of tokenizer_config.json, empty without one. Raises CheckpointError for a damaged file."""
    file = fetch_file(source, "tokenizer_config.json")
    if file is None:
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}; fetch it again") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} holds no settings but a {type(settings).__name__}; fetch it again")
    return settings


def check_source(source: str) -> None:
    """Raises CheckpointError for what is neither a folder nor can be a hub id; asks no hub and loads nothing."""
    is_path = Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") > 1
    if is_path and not Path(source).is_dir():
        raise CheckpointError(f"no checkpoint folder at {source!r}; give a folder that holds config.json, or a hub id")


def fetch_file(source: str, name: str) -> Path | None:
    """A file of a local folder or of a hub repository; None if there is none. Raises CheckpointError if the hub fails."""
    if Path(source).is_dir():
        file = Path(source, name)
        return file if file.is_file() else None
    try:
        return Path(hf_hub_download(source, name))
    except RemoteEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{source!r} is neither a folder nor a hub id") from error
    except OSError as error:
        raise CheckpointError(f"cannot fetch {name} of {source!r}: {error}") from error
