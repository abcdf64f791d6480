"""JSON of responses, written in small parts from values that are made when they are written; and log-probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from eyas.request import TokenLogprob
from eyas.services.router.http.server import to_bytes
from eyas.tokenizer import Tokenizer

# Values of a response from which a thread prepares it, and which the JSON encoder gets at once.
LARGE_NUM_VALUES = 4096
_BLOCK_BYTES = 64 * 2**10

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


async def run(num_values: int, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Return what a function returns; run it in a thread if it has many values to handle."""
    return await asyncio.to_thread(function, *arguments) if num_values > LARGE_NUM_VALUES else function(*arguments)


class LazyList(Sequence[Any], Generic[ItemT]):
    """A list of JSON whose entries are made from items when they are read: as objects they take ten times the memory."""

    def __init__(self, make: Callable[[ItemT], Any], items: Sequence[ItemT]) -> None:
        self._make = make
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: Any) -> Any:
        return list(map(self._make, self._items[at])) if isinstance(at, slice) else self._make(self._items[at])


def num_values(value: object) -> int:
    """Estimate how many values JSON has; those of a list by its first entries."""
    if isinstance(value, dict):
        return 1 + sum(map(num_values, value.values()))
    if isinstance(value, list | LazyList):
        return 1 + len(value) * max(map(num_values, value[:4]), default=0)
    return 1


def json_blocks(value: dict[str, Any], before: str = "") -> list[bytes]:
    """Return JSON in one line as UTF-8, in blocks that are sent one by one. before: a text in front of it."""
    blocks, parts, length = [], [before], 0
    for piece in _pieces(value):
        parts.append(piece)
        length += len(piece)
        if length >= _BLOCK_BYTES:
            blocks.append(to_bytes("".join(parts)))
            parts, length = [], 0
    return [*blocks, to_bytes("".join(parts))]


def _pieces(value: object) -> Iterator[str]:
    """Yield the parts of a JSON text. The encoder keeps the interpreter lock to its end, so it gets a part at a time."""
    size = num_values(value)
    if size > LARGE_NUM_VALUES and isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_dumps(name)}:"
            yield from _pieces(item)
        yield "}"
    elif size > LARGE_NUM_VALUES and isinstance(value, list | LazyList):
        step = max(LARGE_NUM_VALUES * len(value) // size, 1)
        for start in range(0, len(value), step):
            yield "," if start else "["
            yield from _pieces(value[start]) if step == 1 else [_dumps(value[start : start + step])[1:-1]]
        yield "]"
    else:
        yield _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=list)


def named_frame(event: dict[str, Any]) -> list[bytes]:
    """Return an event with its type as a stream names it."""
    return json_blocks(event, f"event: {event['type']}\ndata: ")


def completion_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
    """Return log-probabilities as /v1/completions has them. offsets: see `text_offsets`."""
    return {
        "tokens": [token_name(tokenizer, entry.token) for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": LazyList(partial(_top_by_name, tokenizer), logprobs),
        "text_offset": offsets[:-1],
    }


def text_offsets(
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprob],
    offset: int,
    skip_special_tokens: bool = True,
    begins_text: bool = False,
) -> list[int]:
    """Return where in a choice the characters of each token begin, and where those of the last one end.

    offset: characters of the choice before these tokens. begins_text: whether no text comes before the choice.
    """
    offsets = [offset]
    for entry in logprobs:
        is_first = begins_text and offsets[-1] == 0
        offsets.append(offsets[-1] + tokenizer.num_characters(entry.token, skip_special_tokens, is_first))
    return offsets


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities as /v1/chat/completions has them."""

    def content(entry: TokenLogprob) -> dict[str, Any]:
        top = [_chat_entry(tokenizer, token, logprob) for token, logprob in _top(entry)]
        return _chat_entry(tokenizer, entry.token, entry.logprob) | {"top_logprobs": top}

    return {"content": LazyList(content, logprobs), "refusal": None}


def prompt_token_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> Sequence[dict[str, Any] | None]:
    """Return one object by token id for each token of the prompt; null for the first, which has no log-probability."""

    def by_id(entry: TokenLogprob) -> dict[str, Any] | None:
        if entry.logprob is None:
            return None
        pairs = ((entry.token, entry.logprob), *_top(entry))
        return {
            str(token): {"logprob": _finite(logprob), "decoded_token": token_name(tokenizer, token)}
            for token, logprob in pairs
        }

    return LazyList(by_id, logprobs)


def _top(entry: TokenLogprob) -> Iterator[tuple[int, float]]:
    return zip(entry.top_ids, entry.top_logprobs, strict=True)


def _top_by_name(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float | None] | None:
    """Return the likeliest tokens, and the token itself if it is not among them."""
    if entry.logprob is None:
        return None
    pairs = [*_top(entry), (entry.token, entry.logprob)]
    return {token_name(tokenizer, token): _finite(logprob) for token, logprob in pairs}


def _chat_entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    encoded = tokenizer.token_bytes(token)
    return {"token": encoded.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(encoded)}


_MIN_LOGPROB = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text; `bytes:` and its escaped bytes if they are not whole characters."""
    encoded = tokenizer.token_bytes(token)
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)
