"""Results of a generation: the chunks of a stream with their text, and the output of a request under vLLM's names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from eyas.api.request import Chunk, FinishReason, GenerationStats, TokenLogprob
from eyas.errors import EyasError, InvalidRequest, RequestFailed
from eyas.text.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True)
class Totals:
    """Token counts of a finished generation.

    Attributes:
        stats: speculation statistics; None if the router has not summed them.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    stats: GenerationStats | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class TextChunk:
    """A chunk as a client receives it.

    Attributes:
        text: new text; empty from a verifier, and while a character is incomplete.
        text_lengths: for each new token, the number of characters of `text` that it completes.
        seed: the seed in use, on the first chunk only.
        totals: set if and only if chunk.finish_reason is set.
        stop_reason: the stop string or the token of `stop_token_ids` that ended the text; None for another end.
    """

    chunk: Chunk
    text: str = ""
    text_lengths: tuple[int, ...] = ()
    seed: int | None = None
    totals: Totals | None = None
    stop_reason: int | str | None = None

    @property
    def token_texts(self) -> list[str]:
        """The part of `text` that each new token completes. Behind them comes `released_text`."""
        ends = list(itertools.accumulate(self.text_lengths))
        return [self.text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def released_text(self) -> str:
        """The end of `text`, which earlier tokens had completed and which was held back until the last chunk."""
        return self.text[sum(self.text_lengths) :]


@dataclass
class TextDecoder:
    """Decoder that turns the chunks of one completion into chunks with text. A stop string ends them; later tokens do not
    count.

    Attributes:
        text: decodes the tokens, and has the stop strings.
        stop_token_ids: tokens that may end the completion, for `stop_reason`.
        num_prompt_tokens: for the totals.
        seed: of the completion; None once a chunk has it.
        index: which of the n completions.
        stopped: whether a stop string was found.
    """

    text: TextStream
    stop_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    seed: int | None
    index: int = 0
    stopped: bool = False
    _stats: GenerationStats = field(default_factory=GenerationStats)
    _num_output_tokens: int = 0
    _num_cached_tokens: int = 0

    def add(self, received: Chunk) -> TextChunk:
        """Decode the next chunk. After `stopped`, there is no next one."""
        texts = self.text.push(received.token_ids, ends=received.finish_reason == "stop")
        chunk = received if len(texts) == len(received.token_ids) else received.first(len(texts))
        text = "".join(texts)
        if chunk.index != self.index:
            chunk = replace(chunk, index=self.index)
        last = chunk.token_ids[-1] if chunk.finish_reason == "stop" and chunk.token_ids else None
        stop_reason: int | str | None = last if last in self.stop_token_ids else None
        self.stopped = self.text.stop_string is not None
        if not self.stopped and chunk.finish_reason is not None:
            text += self.text.flush()
        if self.stopped or (self.text.stop_string is not None and chunk.finish_reason in ("stop", "length")):
            chunk, stop_reason = replace(chunk, finish_reason="stop"), self.text.stop_string
        self._stats.add(chunk)
        if not self._num_output_tokens:  # of several verifiers that a request moved to, only the first counts
            self._num_cached_tokens = chunk.num_cached
        self._num_output_tokens += len(chunk.token_ids)
        seed, self.seed = self.seed, None
        totals = None
        if chunk.finish_reason is not None:
            totals = Totals(self.num_prompt_tokens, self._num_output_tokens, self._stats, self._num_cached_tokens)
        return TextChunk(chunk, text, tuple(map(len, texts)), seed, totals, stop_reason)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the target, before penalties, temperature and filters.

    Attributes:
        rank: 1 for the likeliest token; None if the token is none of the likeliest that were asked for.
        decoded_token: its text; None where no tokenizer is at hand.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the n completions.
        text: cut before a stop string.
        token_ids: end with the stop token, or the token that completed a stop string.
        cumulative_logprob: sum over all tokens so far; None if no log-probabilities were asked for.
        logprobs: for each token, itself and the likeliest tokens; None if none were asked for.
        finish_reason: "stop", "length" or "cancelled"; None while the completion goes on.
        stop_reason: the stop string or the token of `stop_token_ids` that ended it; None for another end.
        seed: the one that was used; the same request with this seed gives the same tokens.
        stats: speculation in numbers.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None

    def copied(self) -> CompletionOutput:
        """Return a copy that does not change with this one."""
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return replace(self, token_ids=list(self.token_ids), logprobs=logprobs, stats=replace(self.stats))


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        prompt: the prompt as text, of a chat as its template renders it; None for token ids.
        prompt_token_ids: empty if they are not known, as for a prompt of text that a router encodes.
        outputs: the completions in order; of a stream those that changed.
        finished: whether all completions have ended.
        prompt_logprobs: for each token of the prompt, itself and the likeliest tokens; None for the first token, which has
            none. None if none were asked for.
        num_cached_tokens: prompt tokens of the first completion that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


@dataclass
class OutputBuilder:
    """Builder that collects the chunks of a request's completions.

    Attributes:
        prompt: text of the prompt, None for token ids.
        num_running: completions that have not ended.
        tokenizer: for the text of tokens in log-probabilities; None leaves it out.
        error: why the request failed; None if it did not.
        unread: chunks since the last output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    num_running: int = 1
    tokenizer: Tokenizer | None = None
    error: EyasError | None = None
    unread: list[TextChunk] = field(default_factory=list)
    _completions: dict[int, CompletionOutput] = field(default_factory=dict)  # since the last output that was a delta
    _texts: dict[int, list[str]] = field(default_factory=dict)  # what follows their texts: joined once, in linear time
    _prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    _num_cached: int = 0

    def add(self, received: TextChunk) -> None:
        """Add a chunk of the completion chunk.index."""
        chunk = received.chunk
        completion = self._completions.setdefault(chunk.index, CompletionOutput(chunk.index))
        self.unread.append(received)
        completion.token_ids += chunk.token_ids
        self._texts.setdefault(chunk.index, []).append(received.text)
        completion.stats.add(chunk)
        if received.seed is not None:
            completion.seed = received.seed
        if chunk.index == 0:
            self._num_cached += chunk.num_cached
        if chunk.logprobs:
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs += map(self._logprobs, chunk.logprobs)
            new = sum(entry.logprob or 0.0 for entry in chunk.logprobs)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + new
        if chunk.prompt_logprobs:
            self._prompt_logprobs = [self._logprobs(entry) or None for entry in chunk.prompt_logprobs]
        if chunk.finish_reason is not None:
            self.num_running -= 1
            completion.finish_reason, completion.stop_reason = chunk.finish_reason, received.stop_reason
            if chunk.finish_reason == "error":
                self.error = (InvalidRequest if chunk.is_invalid else RequestFailed)(chunk.message)

    def output(self, indices: Iterable[int] | None = None) -> RequestOutput:
        """Return the whole output so far, or that of some of the completions."""
        self.unread = []
        asked = sorted(self._completions) if indices is None else indices
        for index, texts in self._texts.items():
            self._completions[index].text += "".join(texts)
        self._texts.clear()
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.prompt_token_ids),
            [self._completions[index].copied() for index in asked],
            self.num_running == 0,
            self._prompt_logprobs,
            self._num_cached,
        )

    def delta(self) -> RequestOutput:
        """Return what is new since the last delta: tokens, text and log-probabilities of the completions that changed."""
        changed = sorted({received.chunk.index for received in self.take()})
        output = self.output(changed)
        for index in changed:
            own = self._completions[index]
            self._completions[index] = replace(own, text="", token_ids=[], logprobs=None if own.logprobs is None else [])
        return output

    def take(self) -> list[TextChunk]:
        """Return the chunks since the last output."""
        taken, self.unread = self.unread, []
        return taken

    def _logprobs(self, entry: TokenLogprob) -> dict[int, Logprob]:
        """Return the token itself first, then the likeliest ones; empty for the first token of a prompt."""
        if entry.logprob is None:
            return {}
        rank = entry.top_ids.index(entry.token) + 1 if entry.token in entry.top_ids else None
        found = {entry.token: Logprob(entry.logprob, rank, self._text_of(entry.token))}
        for place, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            found.setdefault(token, Logprob(logprob, place, self._text_of(token)))
        return found

    def _text_of(self, token: int) -> str | None:
        return self.tokenizer.token_text(token) if self.tokenizer else None
