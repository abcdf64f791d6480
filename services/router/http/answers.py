"""Chunks of the front as OpenAI's answers: in one piece, or one event after the other. Knows no sockets."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from eyas.errors import RequestFailed
from eyas.request import GenerationStats, TokenLogprob
from eyas.rpc.messages import TextChunk
from eyas.text import TokenText
from services.router.http.logprobs import chat_logprobs, completion_logprobs, num_characters, prompt_logprobs


@dataclass(frozen=True)
class Piece:
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


class Form(Protocol):
    """What the two endpoints write differently: their objects' names, and a choice."""

    @property
    def whole_name(self) -> str: ...

    @property
    def event_name(self) -> str: ...

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A choice that is done."""
        ...

    def event(self, piece: Piece) -> dict[str, Any]:
        """A choice as far as one event adds to it."""
        ...


@dataclass(frozen=True)
class CompletionForm:
    """/v1/completions. wants_logprobs: null otherwise."""

    tokenizer: TokenText
    wants_logprobs: bool
    whole_name: str = "text_completion"
    event_name: str = "text_completion"

    def whole(self, piece: Piece) -> dict[str, Any]:
        logprobs = completion_logprobs(self.tokenizer, piece.told, piece.offset) if self.wants_logprobs else None
        choice = {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        return choice | _apart(self.tokenizer, piece)

    def event(self, piece: Piece) -> dict[str, Any]:
        return self.whole(piece)


@dataclass(frozen=True)
class ChatForm:
    """/v1/chat/completions. wants_logprobs: null otherwise."""

    tokenizer: TokenText
    wants_logprobs: bool
    whole_name: str = "chat.completion"
    event_name: str = "chat.completion.chunk"

    def whole(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, "message", {"role": "assistant", "content": piece.text, "refusal": None})

    def event(self, piece: Piece) -> dict[str, Any]:
        role = {"role": "assistant"} if piece.opens else {}
        text = {"content": piece.text} if piece.text or piece.opens else {}
        return self._choice(piece, "delta", role | text)

    def _choice(self, piece: Piece, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(self.tokenizer, piece.told) if self.wants_logprobs else None
        choice = {"index": piece.index, name: message, "logprobs": logprobs, "finish_reason": piece.finish}
        return choice | _apart(self.tokenizer, piece)


def _apart(tokenizer: TokenText, piece: Piece) -> dict[str, Any]:
    return {"prompt_logprobs": prompt_logprobs(tokenizer, piece.prompt_told)} if piece.prompt_told else {}


@dataclass(frozen=True)
class Plan:
    """What an answer is made of.

    n: completions of each prompt. echoes: the prompts' texts, to be said first; empty for none. wants_prompt_logprobs: apart
    from the text's own. wants_speculation: how it was drafted for, besides the usage.
    """

    n: int
    echoes: Sequence[str] = ()
    wants_prompt_logprobs: bool = False
    wants_speculation: bool = False


@dataclass
class Answers:
    """All choices of one request as they grow, and their usage. A prompt counts once, however many completions it has."""

    id: str
    model: str
    form: Form
    tokenizer: TokenText
    plan: Plan
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
        choices: defaultdict[int, list[Piece]] = defaultdict(list)
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

    def _piece(self, chunk: TextChunk) -> Piece:
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
        piece = Piece(index, text, told, offset, inner.finish_reason, opens, apart)
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
    reached = [stats.num_rounds, *stats.accepted_by_depth, 0]
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0,
        "acceptance_histogram": [here - further for here, further in pairwise(reached)],
        "num_spec_steps": stats.num_rounds,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
    }


def _joined(pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    told = tuple(entry for piece in pieces for entry in piece.told)
    apart = tuple(entry for piece in pieces for entry in piece.prompt_told)
    return replace(pieces[0], text=text, told=told, finish=pieces[-1].finish, prompt_told=apart)
