"""What requests want to be told of the target's law: raw logits of a step in, log-probabilities on its chunks out.

Raw means before biases, penalties, temperature and filters, as OpenAI's and vLLM's clients expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.engine.acceptance.match import Accepted
from eyas.engine.acceptance.paths import paths
from eyas.engine.acceptance.trials import Trials
from eyas.engine.sequence import Work
from eyas.models.inputs import Ints
from eyas.models.sampling.logprobs import log_probs
from eyas.models.tensors import upload
from eyas.request import Chunk, TokenLogprob
from eyas.tree import DraftTree


@dataclass(frozen=True)
class Told:
    """Log-probabilities for one request's next chunk. output: one per accepted token, and one for the bonus token."""

    prompt: tuple[TokenLogprob, ...] = ()
    output: tuple[TokenLogprob, ...] = ()


def drawn_rows(logits: Tensor, works: Seq[Work]) -> Tensor:
    """Of a step's logits [R, V] the rows that tokens are drawn from: all but those that only prompt_logprobs wants."""
    if not any(work.num_shown for work in works):
        return logits
    rows = [row for work, start in _placed(works) for row in range(start + work.num_shown, start + work.num_wanted)]
    return logits[upload(rows, logits.device)]


def answered(logits: Tensor, works: Seq[Work], tokens: Tensor, trials: Trials) -> Tensor:
    """What there is to tell, on the device, float64 [A, 1 + 2 k]: of each answer the token's log-probability, then those of
    the k likeliest, then their ids. Does not wait for it.

    logits [R, V]: all wanted rows of the step. tokens int64 [N]: the samples at the drawn ones. The answers are first those
    about prompts, then for each request that asked those about its path, as many for all as the deepest tree has levels.
    """
    device = logits.device
    questions = [upload(_about_prompt(work, start), device) for work, start in _placed(works) if work.num_shown]
    if any(map(_asks, works)):
        questions.append(_about_paths(works, tokens, trials))
    if not questions:
        return torch.zeros(0, 1, dtype=torch.float64, device=device)
    rows, chosen = torch.cat(questions, 1)
    most = max(max(_num_prompt_top(work) if work.num_shown else 0, _num_top(work)) for work in works)
    scores, top = log_probs(logits[rows], chosen.clamp(max=logits.shape[1] - 1), most)
    return torch.cat([scores[:, None].double(), top.scores.double(), top.ids.double()], 1)


def told(works: Seq[Work], accepted: Seq[Accepted | None], answers: npt.NDArray[np.float64]) -> dict[str, Told]:
    """The answers, once they are on the host, by id of the requests that asked.

    Log-probabilities of a prompt gather on its sequence until the prompt is done.
    """
    rows = iter(answers.tolist())
    for work in works:
        if work.num_shown:
            entries = [_entry(token, next(rows), _num_prompt_top(work)) for token in _shown(work)]
            work.sequence.prompt_logprobs[work.first :] = entries
    levels = 1 + max((_depth(work) for work in works if _asks(work)), default=0)
    parts = {}
    for work, outcome in zip(works, accepted, strict=True):
        path = [next(rows) for _ in range(levels)] if _asks(work) else []
        if outcome is not None:
            told_of = () if work.sequence.failure else zip(outcome.tokens, path, strict=False)
            output = tuple(_entry(token, row, _num_top(work)) for token, row in told_of)
            parts[work.sequence.request.id] = Told(_gathered(work), output)
    return {request_id: part for request_id, part in parts.items() if part.prompt or part.output}


def attached(chunks: Seq[Chunk], told: Mapping[str, Told]) -> list[Chunk]:
    """The chunks of a step, each with what there is to tell of its tokens."""
    return [_attached(chunk, told[chunk.request_id]) if chunk.request_id in told else chunk for chunk in chunks]


def _attached(chunk: Chunk, told: Told) -> Chunk:
    return replace(chunk, logprobs=told.output[: len(chunk.token_ids)], prompt_logprobs=told.prompt)


def _placed(works: Seq[Work]) -> Iterator[tuple[Work, int]]:
    """Each work with the first of its wanted rows."""
    start = 0
    for work in works:
        yield work, start
        start += work.num_wanted


def _asks(work: Work) -> bool:
    """Whether it is asked about the output of this step."""
    return work.sequence.request.sampling.logprobs is not None and work.emits


def _num_top(work: Work) -> int:
    return work.sequence.request.sampling.logprobs or 0


def _num_prompt_top(work: Work) -> int:
    return work.sequence.request.sampling.prompt_logprobs or 0


def _depth(work: Work) -> int:
    return work.tree.depth if work.tree else 0


def _shown(work: Work) -> list[int]:
    """The prompt tokens after the shown rows."""
    return work.sequence.tokens[work.first + 1 : work.first + 1 + work.num_shown]


def _about_prompt(work: Work, start: int) -> Ints:
    """Rows of logits and the tokens after them, [2, A]."""
    return np.stack([np.arange(start, start + work.num_shown), np.array(_shown(work), dtype=np.int64)])


def _about_paths(works: Seq[Work], tokens: Tensor, trials: Trials) -> Tensor:
    """The same of all asking works' paths, whose drawn rows are placed among all wanted ones."""
    trees: dict[int, DraftTree] = {}
    shown: list[int] = []
    drawn = 0
    for work, start in _placed(works):
        if _asks(work):
            trees[drawn] = work.tree or DraftTree.root_only(work.sequence.tokens[-1])
            shown.append(start + work.num_shown - drawn)
        drawn += len(work.drawn)
    walked = paths(trees, tokens, trials)
    return torch.stack([walked.rows + upload(shown, tokens.device)[:, None], walked.tokens]).flatten(1)


def _entry(token: int, answer: Seq[float], num_top: int) -> TokenLogprob:
    """An answer for k likeliest, cut to so many as were asked for."""
    most = len(answer) // 2
    ids = tuple(map(int, answer[1 + most : 1 + most + num_top]))
    return TokenLogprob(token, answer[0], ids, tuple(answer[1 : 1 + num_top]))


def _gathered(work: Work) -> tuple[TokenLogprob, ...]:
    """Of the prompt, with the first token that nothing foretells; once, where it was asked for."""
    sequence = work.sequence
    if sequence.request.sampling.prompt_logprobs is None or sequence.num_emitted > 0:
        return ()
    return (TokenLogprob(sequence.tokens[0], None), *sequence.prompt_logprobs)
