"""Where a sequence ends: accepted tokens in, those that are emitted and the reason out. Integers only."""

from __future__ import annotations

from eyas.engine.sequence import Sequence
from eyas.request import FinishReason


def trim(sequence: Sequence, tokens: tuple[int, ...], eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Up to the first stop token, that one included; a stop comes before the length."""
    for index, token in enumerate(tokens[: sequence.num_remaining]):
        if _stops(sequence, token, eos_ids):
            return tokens[: index + 1]
    return tokens[: sequence.num_remaining]


def finish_reason(sequence: Sequence, tokens: tuple[int, ...], eos_ids: frozenset[int]) -> FinishReason | None:
    """Why the sequence ends with trimmed `tokens`; None if it goes on."""
    if _stops(sequence, tokens[-1], eos_ids):
        return "stop"
    return "length" if len(tokens) == sequence.num_remaining else None


def _stops(sequence: Sequence, token: int, eos_ids: frozenset[int]) -> bool:
    sampling = sequence.request.sampling
    return token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)
