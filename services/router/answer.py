"""From a request's token chunks to what its client sees: text, stop strings, totals. Knows no network."""

from __future__ import annotations

from dataclasses import replace

from eyas.request import Chunk, GenerationStats, Request
from eyas.rpc.messages import TextChunk, Totals
from eyas.text import TokenText


class Answer:
    """One request's answer as it grows. The request's seed must be set."""

    def __init__(self, request: Request, tokenizer: TokenText) -> None:
        self._request = request
        self._text = tokenizer.stream(request.sampling.stop)
        self._stats = GenerationStats()
        self._num_output_tokens = 0
        self._num_cached = 0
        self._seed = request.sampling.seed

    def add(self, chunk: Chunk) -> TextChunk:
        """The next chunk for the client; after one with a finish reason no more may be added."""
        piece = self._text.push(chunk.token_ids)
        if piece.stopped:
            num_tokens = len(piece.texts)
            token_ids, foreseen = chunk.token_ids[:num_tokens], chunk.foreseen[:num_tokens]
            chunk = replace(chunk, token_ids=token_ids, foreseen=foreseen, finish_reason="stop")
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
        return Totals(len(self._request.prompt_ids), self._num_output_tokens, self._stats, self._num_cached)
