"""Errors in OpenAI's shape: given what went wrong, gives back a status, headers and a body. Knows no request.

Log-probabilities in OpenAI's two forms, and how it spells single tokens. Knows no requests.

Chunks of the front as OpenAI's answers: in one piece, or one event after the other. Knows no sockets.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import pairwise
from typing import Any, Protocol

from eyas.errors import (
    EyasError,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    TimedOut,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from eyas.request import GenerationStats, TokenLogprob
from eyas.rpc.messages import TextChunk
from eyas.tokenizer import Tokenizer

RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class ErrorKind:
    """What OpenAI's clients are told of an error besides its message."""

    status: int
    type: str
    code: str | None = None


# The first entry that fits an error is its kind.
_KINDS: tuple[tuple[type[EyasError], ErrorKind], ...] = (
    (UnknownModel, ErrorKind(404, "invalid_request_error", "model_not_found")),
    (InvalidRequest, ErrorKind(400, "invalid_request_error")),
    (Unauthenticated, ErrorKind(401, "invalid_request_error", "invalid_api_key")),
    (Overloaded, ErrorKind(429, "rate_limit_error", "overloaded")),
    (Unavailable, ErrorKind(503, "server_error", "unavailable")),
    (TimedOut, ErrorKind(504, "server_error", "timeout")),
)
_INTERNAL = ErrorKind(500, "server_error", "internal_error")


@dataclass(frozen=True)
class ErrorResponse:
    """An answer that says what went wrong. param: the field of the body that is to blame; empty if none alone is."""

    kind: ErrorKind
    message: str
    param: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        told = {"message": self.message, "type": self.kind.type, "param": self.param or None, "code": self.kind.code}
        return {"error": told}


def refusal(error: EyasError) -> ErrorResponse:
    """The answer to an error of the front."""
    kind = next((kind for type_, kind in _KINDS if isinstance(error, type_)), _INTERNAL)
    param = error.param if isinstance(error, InvalidRequest) else ""
    return ErrorResponse(kind, str(error), param, _headers(error))


def status_refusal(status: int, message: str) -> ErrorResponse:
    """The answer to what HTTP itself refuses, such as an unknown path."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return ErrorResponse(ErrorKind(status, kind), message)


def _headers(error: EyasError) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | Unavailable):
        seconds = (error.retry_after if isinstance(error, Overloaded) else None) or RETRY_SECONDS
        return {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(math.ceil(seconds * 1000))}
    return {}


_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
# JSON has no infinity; OpenAI says this of a token that is out of the question.
_LEAST = -9999.0


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
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


def num_characters(tokenizer: Tokenizer, token: int) -> int:
    """How many characters of the text begin in a token."""
    return 0 if tokenizer.is_special(token) else sum(byte & 0xC0 != 0x80 for byte in token_bytes(tokenizer, token))


def completion_logprobs(tokenizer: Tokenizer, told: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
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


def chat_logprobs(tokenizer: Tokenizer, told: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The form of /v1/chat/completions."""
    content = [
        _entry(tokenizer, entry.token, entry.logprob)
        | {"top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in _top(entry)]}
        for entry in told
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, told: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
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


def _by_spelling(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float | None] | None:
    """The likeliest tokens, and the token itself where it is none of them."""
    if entry.logprob is None:
        return None
    pairs = [*_top(entry), (entry.token, entry.logprob)]
    return {_spelled(tokenizer, token): _finite(logprob) for token, logprob in pairs}


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    own = token_bytes(tokenizer, token)
    return {"token": own.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(own)}


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; as `bytes:` and its escaped bytes where it is no whole characters."""
    own = token_bytes(tokenizer, token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)


@dataclass(frozen=True)
class TextDelta:
    """What a chunk adds to a choice, or all that its chunks have added.

    told: log-probabilities of its tokens, in an echo's first piece of the prompt's before them. offset: characters of the
    tokens before it. prompt_told: log-probabilities of the prompt, for those who asked for them apart.
    """

    index: int
    text: str
    told: tuple[TokenLogprob, ...] = ()
    offset: int = 0
    finish: str | None = None
    opens: bool = False
    prompt_told: tuple[TokenLogprob, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing in it for a client to see."""
        return not (self.text or self.told or self.finish or self.prompt_told)


class ResponseForm(Protocol):
    """What the two endpoints write differently: their objects' names, and a choice."""

    @property
    def whole_name(self) -> str: ...

    @property
    def event_name(self) -> str: ...

    def whole(self, piece: TextDelta) -> dict[str, Any]:
        """A choice that is done."""
        ...

    def event(self, piece: TextDelta) -> dict[str, Any]:
        """A choice as far as one event adds to it."""
        ...


@dataclass(frozen=True)
class CompletionForm:
    """/v1/completions. wants_logprobs: null otherwise."""

    tokenizer: Tokenizer
    wants_logprobs: bool
    whole_name: str = "text_completion"
    event_name: str = "text_completion"

    def whole(self, piece: TextDelta) -> dict[str, Any]:
        logprobs = completion_logprobs(self.tokenizer, piece.told, piece.offset) if self.wants_logprobs else None
        choice = {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        return choice | _apart(self.tokenizer, piece)

    def event(self, piece: TextDelta) -> dict[str, Any]:
        return self.whole(piece)


@dataclass(frozen=True)
class ChatForm:
    """/v1/chat/completions. wants_logprobs: null otherwise."""

    tokenizer: Tokenizer
    wants_logprobs: bool
    whole_name: str = "chat.completion"
    event_name: str = "chat.completion.chunk"

    def whole(self, piece: TextDelta) -> dict[str, Any]:
        return self._choice(piece, "message", {"role": "assistant", "content": piece.text, "refusal": None})

    def event(self, piece: TextDelta) -> dict[str, Any]:
        role = {"role": "assistant"} if piece.opens else {}
        text = {"content": piece.text} if piece.text or piece.opens else {}
        return self._choice(piece, "delta", role | text)

    def _choice(self, piece: TextDelta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(self.tokenizer, piece.told) if self.wants_logprobs else None
        choice = {"index": piece.index, name: message, "logprobs": logprobs, "finish_reason": piece.finish}
        return choice | _apart(self.tokenizer, piece)


def _apart(tokenizer: Tokenizer, piece: TextDelta) -> dict[str, Any]:
    return {"prompt_logprobs": prompt_logprobs(tokenizer, piece.prompt_told)} if piece.prompt_told else {}


@dataclass(frozen=True)
class ResponsePlan:
    """What an answer is made of.

    n: completions of each prompt. echoes: the prompts' texts, to be said first; empty for none. wants_prompt_logprobs: apart
    from the text's own. wants_speculation: how it was drafted for, besides the usage.
    """

    n: int
    echoes: Sequence[str] = ()
    wants_prompt_logprobs: bool = False
    wants_speculation: bool = False


@dataclass
class ResponseWriter:
    """All choices of one request as they grow, and their usage. A prompt counts once, however many completions it has."""

    id: str
    model: str
    form: ResponseForm
    tokenizer: Tokenizer
    plan: ResponsePlan
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _opened: set[int] = field(default_factory=set)
    _num_prompt_tokens: int = 0
    _num_output_tokens: int = 0
    _num_cached: int = 0
    _stats: GenerationStats = field(default_factory=GenerationStats)

    async def events(self, chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[dict[str, Any], None]:
        """An event for every chunk that has something to say. Raises RequestFailed for a completion that failed."""
        async with aclosing(chunks):
            async for chunk in chunks:
                piece = self._piece(chunk)
                if not piece.is_silent:
                    yield self._head(self.form.event_name) | {"choices": [self.form.event(piece)]}

    def last_event(self) -> dict[str, Any]:
        """The event that tells the usage, after all others."""
        return self._head(self.form.event_name) | {"choices": [], **self._sums()}

    async def whole(self, chunks: AsyncGenerator[TextChunk, None]) -> dict[str, Any]:
        """The answer in one piece. Raises RequestFailed for a completion that failed."""
        choices: defaultdict[int, list[TextDelta]] = defaultdict(list)
        async with aclosing(chunks):
            async for chunk in chunks:
                piece = self._piece(chunk)
                choices[piece.index].append(piece)
        done = [self.form.whole(_joined(choices[index])) for index in sorted(choices)]
        return self._head(self.form.whole_name) | {"choices": done, **self._sums()}

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _sums(self) -> dict[str, Any]:
        """All completions in numbers."""
        stats = self._stats
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.num_accepted,
                "rejected_prediction_tokens": stats.num_drafted - stats.num_accepted,
            },
        }
        metrics = {"metrics": {"speculative_decoding": _speculation(stats)}} if self.plan.wants_speculation else {}
        return {"usage": usage} | metrics

    def _piece(self, chunk: TextChunk) -> TextDelta:
        inner, index = chunk.chunk, chunk.chunk.index
        if inner.finish_reason in ("error", "cancelled"):
            raise RequestFailed(inner.message or "the verifier ended the request before it was done")
        self._count(chunk)
        opens = index not in self._opened
        text, told = chunk.text, inner.logprobs
        if self.plan.echoes and opens:
            text = self.plan.echoes[index // self.plan.n] + text
        apart = inner.prompt_logprobs if self.plan.wants_prompt_logprobs else ()
        told = told if apart else inner.prompt_logprobs + told
        offset = self._offsets[index]
        self._offsets[index] += sum(num_characters(self.tokenizer, entry.token) for entry in told)
        piece = TextDelta(index, text, told, offset, inner.finish_reason, opens, apart)
        if not piece.is_silent:
            self._opened.add(index)
        return piece

    def _count(self, chunk: TextChunk) -> None:
        if chunk.totals is None:
            return
        self._num_output_tokens += chunk.totals.num_output_tokens
        if chunk.totals.stats is not None:
            self._stats.merge(chunk.totals.stats)
        if chunk.chunk.index % self.plan.n == 0:
            self._num_prompt_tokens += chunk.totals.num_prompt_tokens
            self._num_cached += chunk.totals.num_cached_tokens


def _speculation(stats: GenerationStats) -> dict[str, Any]:
    """As vLLM tells it, so that what reads its answers reads ours; drafted tokens are all nodes of the trees but roots."""
    reached = [stats.num_verify_steps, *stats.accepted_by_depth, 0]
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0,
        "acceptance_histogram": [here - further for here, further in pairwise(reached)],
        "num_spec_steps": stats.num_verify_steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
    }


def _joined(pieces: Sequence[TextDelta]) -> TextDelta:
    text = "".join(piece.text for piece in pieces)
    told = tuple(entry for piece in pieces for entry in piece.told)
    apart = tuple(entry for piece in pieces for entry in piece.prompt_told)
    return replace(pieces[0], text=text, told=told, finish=pieces[-1].finish, prompt_told=apart)
