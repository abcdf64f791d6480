"""Log-probabilities as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from eyas.api.request import TokenLogprob
from eyas.services.router.http.writers.json_blocks import LazyList
from eyas.text.tokenizer import Tokenizer


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

    Args:
        offset: characters of the choice before these tokens.
        begins_text: whether no text comes before the choice.
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
