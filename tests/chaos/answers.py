"""The requests of the storm with their plain answers, and the comparison of what a client received with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from eyas import LLM
from eyas.api.request import SamplingParams
from eyas.config import EngineConfig
from eyas.kernels.noise import exponential_noise
from tests.support import reference

NUM_FAMILIES = 8
# Two scores nearer than this might swap by rounding. Requests that meet such a pair are not asked.
MARGIN = 2e-4


@dataclass(frozen=True)
class Answer:
    """A request and its plain answer: the tokens, text and finish reason of each completion."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]


@dataclass
class Mismatch:
    """How far a received sequence differs from the expected one, in items."""

    num_wrong: int = 0
    num_lost: int = 0
    num_doubled: int = 0

    def add(self, other: Mismatch) -> None:
        self.num_wrong += other.num_wrong
        self.num_lost += other.num_lost
        self.num_doubled += other.num_doubled

    def __bool__(self) -> bool:
        return bool(self.num_wrong or self.num_lost or self.num_doubled)


def compare(expected: Sequence[object], received: Sequence[object]) -> Mismatch:
    """Say what a sequence lacks, has twice or has wrong.

    A gap or a repeated part counts its length; without such an explanation, everything after the first difference is wrong.
    """
    pairs = zip(expected, received, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(received)))
    rest, wanted = list(received[same:]), list(expected)
    if rest == wanted[same:]:
        return Mismatch()
    for shift in range(1, max(same, len(wanted) - same) + 1):
        if shift <= same and rest == wanted[same - shift :]:
            return Mismatch(num_doubled=shift)
        if same + shift <= len(wanted) and rest == wanted[same + shift :]:
            return Mismatch(num_lost=shift)
    return Mismatch(num_wrong=max(len(rest), len(wanted) - same))


@dataclass
class Received:
    """What a client has received of a request so far, by completion. is_text: it holds characters, not tokens."""

    answer: Answer
    is_text: bool = False
    items: list[list[int | str]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.items = [[] for _ in self.answer.tokens]
        self.finish_reasons = ["" for _ in self.answer.tokens]

    @property
    def num_items(self) -> int:
        return sum(map(len, self.items))

    @property
    def finished(self) -> bool:
        """Whether every completion has ended as it should."""
        return tuple(self.finish_reasons) == self.answer.finish_reasons

    def mismatch(self) -> Mismatch:
        """Compare with the plain answer; of an unfinished completion only what has come."""
        total = Mismatch()
        wanted: Sequence[Sequence[object]] = self.answer.texts if self.is_text else self.answer.tokens
        for expected, items, reason in zip(wanted, self.items, self.finish_reasons, strict=True):
            total.add(compare(expected if reason else expected[: len(items)], items))
        return total


def plain_answers(target: str, vocab_size: int, num_answers: int, most_tokens: int, seed: int) -> list[Answer]:
    """Requests drawn from a seed, half of them greedy, with their plain answers, computed in this process."""
    rng, llm = random.Random(seed), LLM(target, engine=EngineConfig(max_kv_tokens=16384))
    try:
        found: list[Answer] = []
        while len(found) < num_answers:
            asked = [_draw(rng, vocab_size, most_tokens) for _ in range(num_answers)]
            samplings = [sampling for _, sampling in asked]
            for (prompt, sampling), result in zip(asked, llm.generate([p for p, _ in asked], samplings), strict=True):
                parts = [(tuple(c.token_ids), c.text, str(c.finish_reason)) for c in result.outputs]
                answer = Answer(prompt, sampling, *map(tuple, zip(*parts, strict=True)))
                if _least_gap(target, answer) > MARGIN:
                    found.append(answer)
    finally:
        llm.close()
    return found[:num_answers]


def _draw(rng: random.Random, vocab_size: int, most_tokens: int) -> tuple[tuple[int, ...], SamplingParams]:
    """One of a few long beginnings and an end of its own, at temperature 0 or 0.8; some with two completions."""
    family = rng.randrange(NUM_FAMILIES)
    beginning = [3 + (family * 7 + i * 11) % (vocab_size - 3) for i in range(8 * family)]
    prompt = (*beginning, *(rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 40))))
    temperature = rng.choice([0.0, 0.8])
    sampling = SamplingParams(
        max_tokens=rng.randrange(most_tokens // 8, most_tokens),
        temperature=temperature,
        seed=rng.randrange(2**32),
        ignore_eos=rng.random() < 0.9,
        n=2 if temperature and rng.random() < 0.2 else 1,
    )
    return prompt, sampling


@torch.inference_mode()
def _least_gap(target: str, answer: Answer) -> float:
    """The least distance, over the tokens of an answer, between the two best scores whose maximum was drawn."""
    gaps, num_prompt = [], len(answer.prompt)
    for tokens, params in zip(answer.tokens, answer.sampling.completions(), strict=True):
        ids = [*answer.prompt, *tokens]
        scores = reference.forward(target, ids)[num_prompt - 1 : -1]
        if params.temperature > 0:
            assert params.seed is not None
            positions = range(num_prompt, len(ids))
            noise = exponential_noise([params.seed] * len(tokens), positions, torch.arange(scores.shape[1]))
            scores = scores - params.temperature * noise.log()
        best, second = scores.topk(2).values.T
        gaps.append(float((best - second).min()))
    return min(gaps)
