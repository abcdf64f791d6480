"""What requests want to be told of the target's law: raw logits of a step in, log-probabilities on its chunks out.

Raw means before biases, penalties, temperature and filters, as OpenAI's and vLLM's clients expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.engine.acceptance.match import Accepted
from eyas.engine.sequence import Work
from eyas.models.sampling.logprobs import log_probs
from eyas.models.tensors import upload
from eyas.request import Chunk, TokenLogprob


@dataclass(frozen=True)
class Told:
    """Log-probabilities for one request's next chunk. output: one per accepted token, and one for the bonus token."""

    prompt: tuple[TokenLogprob, ...] = ()
    output: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class _Question:
    """A row of logits, the token that came after it, and how many of the likeliest are to be told beside it."""

    row: int
    token: int
    num_top: int


def drawn_rows(logits: Tensor, works: Seq[Work]) -> Tensor:
    """Of a step's logits [R, V] the rows that tokens are drawn from: all but those that only prompt_logprobs wants."""
    if not any(work.num_shown for work in works):
        return logits
    rows = [row for work, start in _placed(works) for row in range(start + work.num_shown, start + work.num_wanted)]
    return logits[upload(rows, logits.device)]


def log_probabilities(logits: Tensor, works: Seq[Work], accepted: Seq[Accepted | None]) -> dict[str, Told]:
    """What there is to tell, by request id, of those that asked. logits [R, V]: all wanted rows of the step.

    Log-probabilities of a prompt gather on its sequence until the prompt is done.
    """
    prompts = [_about_prompt(work, start) for work, start in _placed(works)]
    outputs = [_about_output(work, start, out) for (work, start), out in zip(_placed(works), accepted, strict=True)]
    answers = _answers(logits, [question for part in (*prompts, *outputs) for question in part])
    for work, prompt in zip(works, prompts, strict=True):
        if prompt:
            work.sequence.prompt_logprobs[work.first :] = [next(answers) for _ in prompt]
    told = {
        work.sequence.request.id: Told(_gathered(work), tuple(next(answers) for _ in output))
        for work, output in zip(works, outputs, strict=True)
        if work.drawn
    }
    return {request_id: part for request_id, part in told.items() if part.prompt or part.output}


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


def _about_prompt(work: Work, start: int) -> list[_Question]:
    num_top = work.sequence.request.sampling.prompt_logprobs or 0
    tokens = work.sequence.tokens[work.first + 1 : work.first + 1 + work.num_shown]
    return [_Question(start + i, token, num_top) for i, token in enumerate(tokens)]


def _about_output(work: Work, start: int, outcome: Accepted | None) -> list[_Question]:
    num_top = work.sequence.request.sampling.logprobs
    if num_top is None or outcome is None or work.sequence.failure:
        return []
    rows = [start + work.num_shown + node for node in outcome.path]
    return [_Question(row, token, num_top) for row, token in zip(rows, outcome.tokens, strict=True)]


def _answers(logits: Tensor, questions: Seq[_Question]) -> Iterator[TokenLogprob]:
    """One per question, in order."""
    if not questions:
        return
    rows, tokens = (upload(ints, logits.device) for ints in zip(*((q.row, q.token) for q in questions), strict=True))
    most = max(question.num_top for question in questions)
    chosen, top = log_probs(logits[rows], tokens, most)
    answers = torch.cat([chosen[:, None].double(), top.scores.double(), top.ids.double()], 1).tolist()  # one wait
    for asked, (logprob, *others) in zip(questions, answers, strict=True):
        ids = tuple(map(int, others[most : most + asked.num_top]))
        yield TokenLogprob(asked.token, logprob, ids, tuple(others[: asked.num_top]))


def _gathered(work: Work) -> tuple[TokenLogprob, ...]:
    """Of the prompt, with the first token that nothing foretells; once, where it was asked for."""
    sequence = work.sequence
    if sequence.request.sampling.prompt_logprobs is None or sequence.num_emitted > 0:
        return ()
    return (TokenLogprob(sequence.tokens[0], None), *sequence.prompt_logprobs)
