"""Log-probabilities in OpenAI's two forms, and how it spells single tokens. Knows no requests."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.request import TokenLogprob
from eyas.text import TokenText

_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
# JSON has no infinity; OpenAI says this of a token that is out of the question.
_LEAST = -9999.0


def token_bytes(tokenizer: TokenText, token: int) -> bytes:
    """A token's own bytes, which may be part of a character; of a special token, those of its name."""
    name = tokenizer.name(token)
    if tokenizer.is_special(token):
        return name.encode()
    if found := _BYTE_NAME.fullmatch(name):
        return bytes([int(found[1], 16)])
    alphabet = _byte_alphabet()
    if tokenizer.is_byte_level and all(character in alphabet for character in name):
        return bytes(alphabet[character] for character in name)
    return name.replace(_SPACE, " ").encode() if _SPACE in name else tokenizer.decode([token]).encode()


@functools.cache
def _byte_alphabet() -> Mapping[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable ones stand for themselves, the others follow
    from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def num_characters(tokenizer: TokenText, token: int) -> int:
    """How many characters of the text begin in a token."""
    return 0 if tokenizer.is_special(token) else sum(byte & 0xC0 != 0x80 for byte in token_bytes(tokenizer, token))


def completion_logprobs(tokenizer: TokenText, told: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The form of /v1/completions. offset: how many characters of the choice's text come before these tokens."""
    starts = [offset]
    for entry in told:
        starts.append(starts[-1] + num_characters(tokenizer, entry.token))
    return {
        "tokens": [_spelled(tokenizer, entry.token) for entry in told],
        "token_logprobs": [_finite(entry.logprob) for entry in told],
        "top_logprobs": [_by_spelling(tokenizer, entry) for entry in told],
        "text_offset": starts[:-1],
    }


def chat_logprobs(tokenizer: TokenText, told: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The form of /v1/chat/completions."""
    content = [
        _entry(tokenizer, entry.token, entry.logprob)
        | {"top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in _top(entry)]}
        for entry in told
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: TokenText, told: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """One object by token id for each token of the prompt; null for the first, which nothing comes before."""
    return [
        {
            str(token): {"logprob": _finite(logprob), "decoded_token": _spelled(tokenizer, token)}
            for token, logprob in ((entry.token, entry.logprob), *_top(entry))
        }
        if entry.logprob is not None
        else None
        for entry in told
    ]


def _top(entry: TokenLogprob) -> Iterator[tuple[int, float]]:
    return zip(entry.top_ids, entry.top_logprobs, strict=True)


def _by_spelling(tokenizer: TokenText, entry: TokenLogprob) -> dict[str, float | None] | None:
    """The likeliest tokens, and the token itself where it is none of them."""
    if entry.logprob is None:
        return None
    pairs = [*_top(entry), (entry.token, entry.logprob)]
    return {_spelled(tokenizer, token): _finite(logprob) for token, logprob in pairs}


def _entry(tokenizer: TokenText, token: int, logprob: float | None) -> dict[str, Any]:
    own = token_bytes(tokenizer, token)
    return {"token": own.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(own)}


def _spelled(tokenizer: TokenText, token: int) -> str:
    """A token as text; as `bytes:` and its escaped bytes where it is no whole characters."""
    own = token_bytes(tokenizer, token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)
