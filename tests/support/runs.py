"""Requests run through an engine step by step, and what a plain loop says to them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from eyas.api.request import Chunk, GenerationStats, Request
from eyas.engine.engine import Engine
from tests.support import reference


def run(
    engine: Engine, requests: Sequence[Request], later: Mapping[int, Sequence[Request]] | None = None
) -> dict[str, list[Chunk]]:
    """The chunks of requests until all have ended. later: those that arrive at a step after the first."""
    arrivals, chunks, step = {0: requests, **(later or {})}, dict[str, list[Chunk]](), 0
    while engine.has_work or any(at >= step for at in arrivals):
        for request in arrivals.get(step, ()):
            engine.submit(request)
        for chunk in engine.step():
            chunks.setdefault(chunk.request_id, []).append(chunk)
        engine.check()
        step += 1
    return chunks


def tokens_of(chunks: Iterable[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def outputs_of(chunks: Mapping[str, list[Chunk]]) -> dict[str, list[int]]:
    return {name: tokens_of(own) for name, own in chunks.items()}


def moved(request: Request, written: Sequence[int]) -> Request:
    """What is left of a request for another engine, after the tokens that one has written."""
    sampling, num_emitted = request.sampling, len(written)
    left, least = sampling.max_tokens - num_emitted, max(sampling.min_tokens - num_emitted, 0)
    sampling = replace(sampling, max_tokens=left, min_tokens=least)
    return replace(request, prompt_ids=(*request.prompt_ids, *written), sampling=sampling, num_emitted=num_emitted)


def stats_of(chunks: Mapping[str, list[Chunk]]) -> GenerationStats:
    stats = GenerationStats()
    for chunk in (chunk for own in chunks.values() for chunk in own):
        stats.add(chunk)
    return stats


def assert_plain(target: str, requests: Iterable[Request], chunks: Mapping[str, list[Chunk]]) -> None:
    """Each request has the tokens of a plain loop over transformers' forward."""
    for request in requests:
        expected = reference.generate(target, list(request.prompt_ids), request.sampling)
        assert tokens_of(chunks[request.id]) == expected, f"{request.id} differs"


def chi_square_is_plausible(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Against the 99.9 % quantile (Wilson-Hilferty), with rare tokens pooled."""
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]]).double().clamp(min=1e-9)
    degrees = len(counts) - 1
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() < quantile)
