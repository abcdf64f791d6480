"""What a request asks and what it gets back: plain values that every room shares. Knows no tensors and no network."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from eyas.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_SEED = 2**64 - 1
MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. Filters apply in the order temperature, top_k, top_p.

    max_tokens: most tokens to emit, at least 1.
    temperature: 0 is greedy; above 0 scales the logits by 1/temperature.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, in (0, 1].
    seed: 0 to 2**64-1; None draws one. The same seed gives the same tokens, with or without a drafter.
    stop: strings that end the text; the text is cut before them, tokens are kept up to the one that completes them.
    stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens; kept in token_ids.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def validate(self) -> None:
        """Raises InvalidRequest naming the first field that is out of range."""
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int | None) or isinstance(value, bool):
                raise InvalidRequest(f"{name} is {value!r}; it must be a whole number")
        if not 1 <= self.max_tokens <= MAX_INT:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}; it must lie in [1, 2**31)")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature is {self.temperature}; it must be a finite number, 0 or more")
        if not 0 <= self.top_k <= MAX_INT:
            raise InvalidRequest(f"top_k is {self.top_k}; it must be 0 (keep all) or more, below 2**31")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest(f"seed is {self.seed}; it must lie in [0, 2**64)")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop holds an empty string; leave it out")

    def seeded(self) -> SamplingParams:
        """The same parameters with a seed drawn where none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))


@dataclass(frozen=True)
class NoiseKey:
    """All that a draw depends on besides the logits and the position; what a drafter is told to foresee it."""

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Request:
    """A prompt on its way through the engine.

    session: groups the requests of one conversation, whose slots are kept warm between its turns.
    priority: 0 is normal, higher is more urgent; within a priority the first comes first.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    session: str = ""
    priority: int = 0

    def validate(self) -> None:
        """Raises InvalidRequest naming the first field that is out of range; the prompt is left to those who know the
        vocabulary."""
        if not 0 <= self.priority <= MAX_INT:
            raise InvalidRequest(f"priority is {self.priority}; it must be 0 (normal) or more, below 2**31")
        self.sampling.validate()


@dataclass(frozen=True)
class Round:
    """One verify step of one sequence, in numbers. `accepted` are drafted tokens, the bonus token not counted."""

    drafted: int
    depth: int
    accepted: int
    grown_ahead: bool = False


@dataclass(frozen=True)
class Chunk:
    """What one step adds to a request. foreseen[i] tells whether the drafter had guessed token_ids[i].

    round is None for a step that ends a prefill. message explains the finish reason "error".
    num_cached: prompt tokens that the prefix cache spared; on a request's first tokens only.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    foreseen: tuple[bool, ...] = ()
    round: Round | None = None
    finish_reason: FinishReason | None = None
    message: str = ""
    num_cached: int = 0


@dataclass
class GenerationStats:
    """Speculation in numbers, summed over verify steps. Accepted tokens behind a stop or the length do not count."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Count one chunk; the prefill's own token belongs to no verify step."""
        if chunk.round is None:
            return
        self.num_rounds += 1
        self.num_drafted += chunk.round.drafted
        self.num_accepted += sum(chunk.foreseen)
        self.num_emitted += len(chunk.token_ids)
        _count_up_to(self.offered_by_depth, chunk.round.depth)
        _count_up_to(self.accepted_by_depth, sum(chunk.foreseen))

    def merge(self, other: GenerationStats) -> None:
        """Add another request's counts."""
        self.num_rounds += other.num_rounds
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_emitted += other.num_emitted
        self.offered_by_depth = _summed(self.offered_by_depth, other.offered_by_depth)
        self.accepted_by_depth = _summed(self.accepted_by_depth, other.accepted_by_depth)

    @property
    def acceptance_length(self) -> float:
        """tau: mean tokens per verify step, bonus included; 1.0 without a drafter, 0.0 without a verify step."""
        return self.num_emitted / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Of the rounds whose tree reached depth d, the share that accepted d tokens or more; from depth 1."""
        accepted = self.accepted_by_depth + [0] * len(self.offered_by_depth)
        return [a / o for o, a in zip(self.offered_by_depth, accepted, strict=False)]


def _count_up_to(counts: list[int], depth: int) -> None:
    counts.extend([0] * (depth - len(counts)))
    for level in range(depth):
        counts[level] += 1


def _summed(left: Sequence[int], right: Sequence[int]) -> list[int]:
    size = max(len(left), len(right))
    return [sum(counts[i] for counts in (left, right) if i < len(counts)) for i in range(size)]
