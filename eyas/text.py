"""Text to token ids and back, one token at a time. Given a tokenizer's files; knows no model and no torch.

What a stream gives back does not depend on how its tokens were grouped into chunks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from tokenizers import Tokenizer

from eyas.errors import CheckpointError

_INCOMPLETE = "\ufffd"


def load_tokenizer(source: str) -> TokenText:
    """The tokenizer in a local folder, or of a hub id. Raises CheckpointError when there is none."""
    file = _fetch(source, "tokenizer.json")
    if file is None:
        raise CheckpointError(f"no tokenizer.json in {source!r}; give a folder or a hub id that holds one")
    tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    settings_file = _fetch(source, "tokenizer_config.json")
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file else {}
    bos = settings.get("bos_token")
    content = bos["content"] if isinstance(bos, dict) else bos
    return TokenText(tokenizer, tokenizer.token_to_id(content) if content and settings.get("add_bos_token") else None)


class TokenText:
    """Encodes and decodes. bos is put in front of every prompt that does not begin with it; None adds nothing."""

    def __init__(self, tokenizer: Tokenizer, bos: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._bos = bos
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, as the model expects to see it."""
        ids = tuple(self._tokenizer.encode(text).ids)
        if self._bos is None or not text or ids[:1] == (self._bos,):
            return ids
        return (self._bos, *ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def is_special(self, token: int) -> bool:
        """Whether a token, such as end-of-sequence, has no text."""
        return token in self._special

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A fresh stream that ends at any of the `stop` strings."""
        return TextStream(self, stop)


@dataclass(frozen=True)
class TextPiece:
    """What a chunk of tokens released.

    texts: for each token that counts, the text it made safe to show; tokens after one that completes a stop string do
    not count. stopped: whether a stop string was met.
    """

    texts: tuple[str, ...]
    stopped: bool

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class TextStream:
    """Turns tokens into text as they come. Text that may yet become part of a stop string or of a character is held back."""

    def __init__(self, tokenizer: TokenText, stop: Sequence[str] = ()) -> None:
        self._decoder = _IncrementalDecoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Take the next tokens. After `stopped`, the stream must not be used again."""
        texts: list[str] = []
        for token in token_ids:
            found = self._release(self._decoder.push(token))
            if found is not None:
                return TextPiece((*texts, found), stopped=True)
            texts.append(self._safe())
        return TextPiece(tuple(texts), stopped=False)

    def flush(self) -> str:
        """The text still held back when the tokens have ended; cut before a stop string that it completes."""
        found = self._release(self._decoder.flush())
        rest, self._held = self._held, ""
        return rest if found is None else found

    def _release(self, text: str) -> str | None:
        """Append `text`; give back what stands before the first stop string, or None if there is none."""
        self._held += text
        starts = [at for at in map(self._held.find, self._stop) if at >= 0]
        return self._held[: min(starts)] if starts else None

    def _safe(self) -> str:
        """Take the held text up to the longest tail that begins a stop string."""
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class _IncrementalDecoder:
    """Text of each next token, with as much context as its decoder needs.

    The same idea as `tokenizers.decoders.DecodeStream`, which fails for good once invalid UTF-8 changes the text of
    tokens already out, and cannot give back its rest.
    """

    def __init__(self, tokenizer: TokenText) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        if self._tokenizer.is_special(token):
            return ""
        self._pending.append(token)
        text = self._text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The text of an incomplete end."""
        return self._text() if self._pending else ""

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        both = self._tokenizer.decode(self._context + self._pending)
        return both[len(before) :] if both.startswith(before) else self._tokenizer.decode(self._pending)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _fetch(source: str, name: str) -> Path | None:
    """A file of a local folder or of a hub repository; None where it does not exist."""
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
