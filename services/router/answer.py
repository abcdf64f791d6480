"""From a request's token chunks to what its client sees: text, stop strings, totals. Knows no network."""

from __future__ import annotations

from dataclasses import replace

from eyas.request import Chunk, GenerationStats, Request
from eyas.rpc.messages import TextChunk, Totals
from eyas.text import TokenText


class Answer:
    """The answer of one completion as it grows. asked: the request as it came, with its stop strings. The completion's own
    request must have its seed."""

    def __init__(self, asked: Request, completion: Request, index: int, tokenizer: TokenText) -> None:
        self._index = index
        self._num_prompt_tokens = len(completion.prompt_ids)
        self._text = tokenizer.stream(asked.sampling.stop, asked.sampling.min_tokens)
        self._stats = GenerationStats()
        self._num_output_tokens = 0
        self._num_cached = 0
        self._seed = completion.sampling.seed

    def add(self, chunk: Chunk) -> TextChunk:
        """The next chunk for the client; after one with a finish reason no more may be added."""
        piece = self._text.push(chunk.token_ids)
        chunk = replace(chunk.first(len(piece.texts)), index=self._index)
        if piece.stopped:
            chunk = replace(chunk, finish_reason="stop")
        self._stats.add(chunk)
        if not self._num_output_tokens:  # of the first verifier, should there be several
            self._num_cached = chunk.num_cached
        self._num_output_tokens += len(chunk.token_ids)
        finished = chunk.finish_reason is not None
        rest = self._text.flush() if finished and not piece.stopped else ""
        seed, self._seed = self._seed, None
        return TextChunk(
            chunk=chunk,
            text=piece.text + rest,
            text_lengths=tuple(map(len, piece.texts)),
            seed=seed,
            totals=self._totals() if finished else None,
        )

    def _totals(self) -> Totals:
        return Totals(self._num_prompt_tokens, self._num_output_tokens, self._stats, self._num_cached)
