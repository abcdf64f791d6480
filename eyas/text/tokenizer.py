"""Text to token ids, and token ids to text as they come.

The text of a stream does not depend on how its tokens are grouped into chunks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.config.file_values import TOKENIZER_VALUES, check_values, is_text, read_json, shown
from eyas.config.gguf_files import local_folder
from eyas.errors import CheckpointError, InvalidRequest

_INCOMPLETE = "\ufffd"
# An incomplete character is at most 3 bytes long, and so are at most 3 tokens; more than this many are not all one.
_MAX_TAIL = 3
_MAX_PENDING = 8
# Tokens at the end of a prompt among which its last text is looked for.
_MAX_CONTEXT = 64
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"
# Characters of a token above which a text is unusual.
_PLENTY = 8

log = logging.getLogger(__name__)


def load_tokenizer(source: str) -> Tokenizer:
    """Return the tokenizer of a local folder or hub id. Raises CheckpointError if there is none or it is damaged.

    Truncation and padding that are stored with it are for training; prompts are encoded whole.
    """
    file = fetch_file(source, "tokenizer.json")
    if file is None:
        raise CheckpointError(f"no tokenizer.json in {source!r}; give a folder or a hub id that holds one")
    tokenizer = _parsed(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = tokenizer_settings(source)
    if not settings.get("add_bos_token"):
        return Tokenizer(tokenizer)
    bos = special_token(settings.get("bos_token"))
    bos_id = tokenizer.token_to_id(bos)
    if bos_id is None:
        log.warning(
            "%s: add_bos_token is set, but its bos_token, %s, is no token; prompts begin without", source, shown(bos)
        )
    return Tokenizer(tokenizer, bos_id)


def special_token(value: object) -> str:
    """Return the text of a special token in tokenizer_config.json, which may stand in an object; empty for another value."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if is_text(text) else ""


class Tokenizer:
    """Encoder and decoder of text. bos is put in front of every prompt that does not begin with it; None adds nothing.

    tokenizer: that of the `tokenizers` library.
    special: ids of the special tokens, such as end-of-sequence, which have no text.
    is_byte_level: whether the vocabulary writes each byte of a text as a character of its own.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, bos: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.bos = bos
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._alphabet = _byte_alphabet()
        self.is_byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self._longest = max(map(len, map(str.encode, _tokens(tokenizer)))) or 1

    def check_length(self, num_characters: int, max_tokens: int) -> None:
        """Raises InvalidRequest for a text that has more characters than `max_tokens` tokens can have."""
        if (least := num_characters // self._longest) > max_tokens:
            raise _too_long(least, max_tokens)

    def encode_within(self, text: str, max_tokens: int, is_rendered: bool = False) -> tuple[int, ...]:
        """Encode as `encode` does, or as `encode_rendered`. Raises InvalidRequest for a text that cannot fit.

        Of a text that is far too long only a beginning is encoded. That one has more tokens than allowed by a quarter, since
        the tokens at its end may be others in the whole text.
        """
        self.check_length(len(text), max_tokens)
        length, enough = _PLENTY * max_tokens, max_tokens + max_tokens // 4 + 64
        while 2 * length < len(text):
            if (least := len(self._encode(text[:length], add_special_tokens=False))) > enough:
                raise _too_long(least, max_tokens)
            length *= 2
        return self.encode_rendered(text) if is_rendered else self.encode(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt, special tokens added."""
        return self._with_bos(text, self._encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode each text as `encode` does, on all cores."""
        encoded = self.tokenizer.encode_batch_fast(list(texts))
        return [self._with_bos(text, tuple(encoding.ids)) for text, encoding in zip(texts, encoded, strict=True)]

    def _with_bos(self, text: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if self.bos is None or not text or ids[:1] == (self.bos,) else (self.bos, *ids)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt that holds its special tokens already, as chat templates write them."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a text while other threads run: `encode` of the library keeps the interpreter lock, a batch does not."""
        encoding, *_ = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def bad_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word as token ids inside a text, as given and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(map(self.encode_inside, texts)))

    @cached_property
    def _prefix(self) -> tuple[int, ...]:
        """The token ids of a line's end, where the tokenizer puts a space before every text; empty where it does not."""
        adds_space = self.encode_rendered("a") == self.encode_rendered(" a") != ()
        first = self.tokenizer.id_to_token(self.encode_rendered("a")[0]) if self.encode_rendered("a") else ""
        return self.encode_rendered("\n") if adds_space or (first or "").startswith(_SENTENCEPIECE_SPACE) else ()

    def encode_inside(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that has other text before it, so that no space is put in front of it."""
        ids = self._encode(f"\n{text}" if self._prefix else text, add_special_tokens=False)
        if ids[: len(self._prefix)] == self._prefix:
            return ids[len(self._prefix) :]
        return self._encode(text, add_special_tokens=False)

    def mark_ids(self, text: str) -> tuple[int, ...] | None:
        """Return the token ids of a mark; None if it begins or ends in ordinary text, which may be one token with others."""
        ids = self.encode_inside(text)
        return ids if ids and {ids[0], ids[-1]} <= self._added else None

    def left_context(self, prompt: Sequence[int], is_constrained: bool = False) -> tuple[int, ...]:
        """Return the end of a prompt, on which the first text after it depends: some tokenizers drop a space at the
        beginning.

        is_constrained: the output follows a grammar, which reads that space after a prompt without text too.
        """
        text = [token for token in prompt[-_MAX_CONTEXT:] if token not in self.special][-_MAX_PENDING:]
        if not text:
            return self.encode_rendered("a")[-1:] if is_constrained else tuple(prompt[-_MAX_PENDING:])
        for _ in range(_MAX_TAIL):  # parts of characters would make whole ones beside them invalid
            if self.decode(text).endswith(_INCOMPLETE):
                del text[-1:]
        for _ in range(_MAX_TAIL):
            if self.decode(text).startswith(_INCOMPLETE):
                del text[:1]
        return tuple(text) or tuple(prompt[-1:])

    def has_text(self, prompt: Sequence[int]) -> bool:
        """Return whether text, and not special tokens alone, comes before what follows a prompt."""
        return any(token not in self.special for token in prompt[-_MAX_CONTEXT:])

    def specials_in(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the special tokens whose names occur in texts."""
        ids = (token for text in texts for token in self._encode(text, add_special_tokens=False))
        return frozenset(ids) & self.special

    def name_of(self, token: int) -> str:
        """Return the name of a token in the vocabulary; empty for an id without a token."""
        return self.tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, which may be part of a character; of a special token, those of its
        name.
        """
        name = self.name_of(token)
        if token in self.special:
            return name.encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if self.is_byte_level and all(character in self._alphabet for character in name):
            return bytes(self._alphabet[character] for character in name)
        if _SENTENCEPIECE_SPACE in name:
            return name.replace(_SENTENCEPIECE_SPACE, " ").encode()
        return self.decode([token]).encode()

    def token_text(self, token: int) -> str:
        """Return a token as text; bytes that are no whole character are replaced."""
        return self.token_bytes(token).decode(errors="replace")

    def num_characters(self, token: int, skip_special_tokens: bool = True, is_first: bool = False) -> int:
        """Return the number of characters of a text that begin in a token. is_first: no text comes before it."""
        if skip_special_tokens and token in self.special:
            return 0
        text = self.decode([token], skip_special_tokens=False) if is_first else ""
        if text and _INCOMPLETE not in text:
            return len(text)
        return sum(byte & 0xC0 != 0x80 for byte in self.token_bytes(token))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, special tokens left out unless they are asked for."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ids of those of the names that are special tokens of the vocabulary."""
        return frozenset(id_ for name in names if (id_ := self.tokenizer.token_to_id(name)) is not None) & self.special


class _StopString:
    """Finder of one stop string in text that comes in pieces, in linear time.

    matched: length of the longest end of the text so far that begins the stop string.
    Source: Knuth, Morris and Pratt 1977, Fast Pattern Matching in Strings.

    Args:
        specials: the special tokens whose names it holds.
    """

    def __init__(self, text: str, specials: frozenset[int]) -> None:
        self.text = text
        self.specials = specials
        self.matched = 0
        self._borders = [0]  # of the beginnings of 1, 2, ... characters; as far as they were needed

    def end_in(self, text: str) -> int | None:
        """Take the next text; return where in it the stop string first ends, None if it does not."""
        at = 0
        while at < len(text):
            if not self.matched:
                at = text.find(self.text[0], at)
                if at < 0:
                    return None
            while self.matched and self.text[self.matched] != text[at]:
                self.matched = self._border(self.matched)
            self.matched += self.text[self.matched] == text[at]
            at += 1
            if self.matched == len(self.text):
                return at
        return None

    def _border(self, length: int) -> int:
        """Return the length of the longest proper end of the first `length` characters that is a beginning too."""
        borders = self._borders
        while len(borders) < length:
            character, border = self.text[len(borders)], borders[-1]
            while border and self.text[border] != character:
                border = borders[border - 1]
            borders.append(border + (self.text[border] == character))
        return borders[length - 1]


@dataclass(frozen=True)
class _HiddenName:
    """The name of a special token in held text, from `start` to `end`: part of stop strings, and not shown."""

    start: int
    end: int
    token: int


class TextStream:
    """Stream that turns tokens into text as they come. Text that may become part of a stop string or of a character is held
    back.

    A stop string may hold names of special tokens. They count where the tokens are, also if the text does not show them.

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
        context: Callable[[], Sequence[int]] = tuple,
        stop_specials: Collection[int] = (),
    ) -> None:
        """End the stream at any of the `stop` strings that begins after the text of `min_tokens` tokens.

        Args:
            kept_tokens: special tokens that stay in the text, unless they end the output.
            include_stop: keep the stop string that ends the text; and, if special tokens are not skipped, the one that ends
                the output.
            context: calls `Tokenizer.left_context`, before the first text.
            stop_specials: what `Tokenizer.specials_in` returns.
        """
        self._tokenizer = tokenizer
        self._names = dict(zip(stop_specials, map(tokenizer.name_of, stop_specials), strict=True))
        self._stops = [
            _StopString(text, frozenset(token for token, name in self._names.items() if name in text))
            for text in dict.fromkeys(stop)
        ]
        self.stop_string: str | None = None
        self._skips_special = skip_special_tokens
        self._plain = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._includes_stop = include_stop
        self._kept = frozenset(kept_tokens)
        self._num_unsearched = min_tokens
        self._held = ""
        self._hidden: list[_HiddenName] = []
        self._left_context: Callable[[], Sequence[int]] | None = context
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int], ends: bool = False) -> list[str]:
        """Take the next tokens, until there is a `stop_string`; then the stream must not be used again.

        ends: whether the last of the tokens ended the output.
        Returns, for each token, the text that it made safe to show; tokens after the end of a stop string do not count.
        """
        texts: list[str] = []
        if self._left_context:
            self._context, self._left_context = list(self._left_context()), None
        for number, token in enumerate(token_ids, 1):
            is_end = ends and number == len(token_ids) and not self._includes_stop
            is_skipped = self._skips_special and token not in self._kept
            is_hidden = (is_end or is_skipped) and token in self._tokenizer.special
            is_read = is_hidden and token in self._names
            text = self._before_kept() if is_read else "" if is_hidden else self._decode(token)
            if self._num_unsearched > 0 or not self._stops:
                self._num_unsearched -= 1
                texts.append(text)
                continue
            found = self._release(text)
            if found is None and is_read:
                found = self._release(self._names[token], token)
            if found is not None:
                return [*texts, found]
            end = len(self._held)  # the longest tail that begins a stop string is not safe
            texts.append(self._take(min((self._start(stop, end, stop.matched) for stop in self._stops), default=end)))
        return texts

    def flush(self) -> str:
        """Return the text still held back when the tokens have ended; cut at a stop string that it completes."""
        found = self._release(self._text() if self._pending else "")
        return self._take(len(self._held)) if found is None else found

    def _release(self, text: str, hidden: int | None = None) -> str | None:
        """Append `text`; return what is held up to the first stop string, or None if there is none.

        hidden: the special token whose name it is, which only the stop strings with that name see.
        """
        before = len(self._held)
        self._held += text
        if hidden is not None:
            self._hidden.append(_HiddenName(before, len(self._held), hidden))
        found = []
        for stop in self._stops:
            if hidden is not None and hidden not in stop.specials:
                continue
            if (end := stop.end_in(text)) is not None:
                found.append((self._start(stop, before + end, len(stop.text)), stop.text))
        if not found:
            return None
        at, self.stop_string = min(found)
        return self._take(at) + self.stop_string * self._includes_stop

    def _start(self, stop: _StopString, end: int, length: int) -> int:
        """Return where in the held text the last `length` characters before `end` begin that a stop string sees."""
        at = end - length
        for name in reversed(self._hidden):
            if name.token not in stop.specials and at < name.end <= end:
                at -= name.end - name.start
        return at

    def _take(self, length: int) -> str:
        """Remove the beginning of the held text; return it without the names of hidden tokens."""
        text, self._held = self._held[:length], self._held[length:]
        hidden, self._hidden = self._hidden, []
        for name in reversed(hidden):
            text = text[: name.start] + text[name.end :]
            if name.end > length:  # a stop string may begin inside a name
                self._hidden.insert(0, _HiddenName(max(name.start - length, 0), name.end - length, name.token))
        return text

    def _decode(self, token: int) -> str:
        """Return the text that `token` completes, decoded with as much context as it needs; empty while a character is
        incomplete.

        `tokenizers.decoders.DecodeStream` does the same, but fails for good once invalid UTF-8 changes text that is already
        out, and cannot return its rest.
        """
        if self._skips_special and token in self._tokenizer.special:
            return self._before_kept() + self._tokenizer.decode([token], skip_special_tokens=False)
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
        """Return the text of the first pending tokens, or of all."""
        pending = self._pending[:num_tokens]
        before = self._plain(self._context)
        both = self._plain(self._context + pending)
        return both[len(before) :] if both.startswith(before) else self._plain(pending)


def _tokens(tokenizer: HuggingFaceTokenizer) -> Iterable[str]:
    """Return all tokens. The library's dict takes twice the time, but it also has ids that gaps lead to."""
    size = tokenizer.get_vocab_size()
    tokens = [token for id_ in range(size) if (token := tokenizer.id_to_token(id_)) is not None]
    return tokens if len(tokens) == size else tokenizer.get_vocab()


def _byte_alphabet() -> Mapping[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    Printable bytes stand for themselves; the others are the characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _too_long(least: int, max_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"prompt of at least {least} tokens exceeds the context of {max_tokens} tokens; shorten it", "prompt"
    )


def _parsed(file: Path) -> HuggingFaceTokenizer:
    try:
        tokenizer = HuggingFaceTokenizer.from_buffer(file.read_bytes())
        if not tokenizer.get_vocab_size():
            raise ValueError("it has no tokens")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises nothing narrower, and panics are no Exception
        raise CheckpointError(f"{file} is damaged: {shown(str(error))}; fetch it again") from error
    return tokenizer


def tokenizer_settings(source: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, empty without one. Raises CheckpointError for a wrong value or file."""
    return json_settings(source, "tokenizer_config.json")


def json_settings(source: str, name: str) -> dict[str, Any]:
    """Return the content of a file of settings, empty without one. Raises CheckpointError for a wrong value or file."""
    file = fetch_file(source, name)
    if file is None:
        return {}
    settings = read_json(file)
    check_values(settings, file, TOKENIZER_VALUES)
    return settings


def fetch_file(source: str, name: str) -> Path | None:
    """Return a file of a local folder or of a hub repository; None if there is none. Raises CheckpointError if the hub
    fails.
    """
    if (folder := local_folder(source)) is not None:
        files = (Path(source, name), folder / name)  # what lies beside a GGUF file in its folder comes first
        return next((file for file in files if file.is_file()), None)
    try:
        return Path(hf_hub_download(source, name))
    except RemoteEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{source!r} is neither a folder nor a hub id") from error
    except OSError as error:
        raise CheckpointError(f"cannot fetch {name} of {source!r}: {error}") from error
