"""Log-probabilities of chosen tokens and the likeliest ones beside them: logits in, numbers out. Knows no request.

Legend: N rows, V vocabulary, k reported tokens. The law is the softmax of the logits as they are given.

Accepted paths on the device: trees and the draws at their nodes in, rows and tokens of each path out.

For what is told of a path in the same copy that brings the draws; what is emitted, the walk on the host decides.
Legend: N drawn rows of the step, T trees, L levels of the deepest, the root's included.

What requests want to be told of the target's law: raw logits of a step in, log-probabilities on its chunks out.

Raw means before biases, penalties, temperature and filters, as OpenAI's and vLLM's clients expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.engine.sequence import ScheduledSequence
from eyas.request import Chunk, TokenLogprob
from eyas.sampling.acceptance import Accepted
from eyas.sampling.rejection import RejectionResult
from eyas.sampling.sampler import Ranked, rank
from eyas.tensors import Ints, upload
from eyas.tree import DraftTree

# Rows that are ranked at once: a long prompt must not need its own size of temporary tensors.
BLOCK = 64


class LogProbs(NamedTuple):
    """chosen: log-probability of each row's token [N]. top: the k likeliest, ties to the lowest id [N, k]."""

    chosen: Tensor
    top: Ranked


def log_probs(logits: Tensor, tokens: Tensor, k: int) -> LogProbs:
    """logits float32 [N, V]; tokens int64 [N]; N at least 1; 0 <= k <= V."""
    blocks = [_block(logits[at : at + BLOCK], tokens[at : at + BLOCK], k) for at in range(0, len(logits), BLOCK)]
    top = Ranked(torch.cat([b.top.scores for b in blocks]), torch.cat([b.top.ids for b in blocks]))
    return LogProbs(torch.cat([b.chosen for b in blocks]), top)


def _block(logits: Tensor, tokens: Tensor, k: int) -> LogProbs:
    law = torch.log_softmax(logits, dim=-1)
    return LogProbs(law.gather(-1, tokens[:, None])[:, 0], rank(law, k))


@dataclass(frozen=True)
class AcceptedPaths:
    """rows: drawn rows of each tree's accepted nodes, the last again behind it; tokens: what is emitted after each. Both
    int64 [T, L]."""

    rows: Tensor
    tokens: Tensor


def accepted_paths(trees: Mapping[int, DraftTree], tokens: Tensor, trials: RejectionResult) -> AcceptedPaths:
    """What `accept` and `accept_drawn` say of each tree, given by the drawn row of its root; at least one.

    tokens: the target's own samples, int64 [N]. Does not wait for the device.
    """
    size, width, device = len(tokens), trials.verdicts.shape[1], tokens.device
    verdicts = {row: size + family * width for family, row in enumerate(trials.families)}
    last, guesses = np.arange(size), np.zeros(size, dtype=np.int64)
    last[list(verdicts)] = [first + width - 1 for first in verdicts.values()]
    for start, tree in trees.items():
        guesses[start : start + len(tree)] = tree.tokens
    nodes = np.concatenate([_nodes(tree, start, verdicts) for start, tree in trees.items()], axis=1)
    rows, parents, cells, wanted = upload(nodes, device)
    said = torch.cat([tokens, trials.verdicts.flatten()])
    eldest = torch.full_like(tokens, size).scatter_reduce(0, parents, torch.where(said[cells] == wanted, rows, size), "amin")
    following = torch.where(eldest < size, eldest, torch.arange(size, device=device))
    ends, guessed = upload(np.stack([last, guesses]), device)
    emitted = torch.where(eldest < size, guessed[following], said[ends])
    path = [upload(list(trees), device)]
    for _ in range(max(tree.depth for tree in trees.values())):
        path.append(following[path[-1]])
    walked = torch.stack(path, 1)
    return AcceptedPaths(walked, emitted[walked])


def _nodes(tree: DraftTree, start: int, verdicts: Mapping[int, int]) -> Ints:
    """Of each drafted node its row, its parent's row, the place of what decides on it, and what that says if it is taken.

    verdicts: where those of a row begin, if its children were tried; else its sample decides.
    """
    columns = []
    for parent, children in tree.families.items():
        tried = verdicts.get(start + parent)
        for order, child in enumerate(children):
            decides = (start + parent, tree.tokens[child]) if tried is None else (tried + order, 1)
            columns.append((start + child, start + parent, *decides))
    return np.array(columns, dtype=np.int64).reshape(-1, 4).T


@dataclass(frozen=True)
class ReportedLogprobs:
    """Log-probabilities for one request's next chunk. output: one per accepted token, and one for the bonus token."""

    prompt: tuple[TokenLogprob, ...] = ()
    output: tuple[TokenLogprob, ...] = ()


def drawn_rows(logits: Tensor, works: Seq[ScheduledSequence]) -> Tensor:
    """Of a step's logits [R, V] the rows that tokens are drawn from: all but those that only prompt_logprobs wants."""
    if not any(work.num_shown for work in works):
        return logits
    rows = [row for work, start in _placed(works) for row in range(start + work.num_shown, start + work.num_wanted)]
    return logits[upload(rows, logits.device)]


def answered(logits: Tensor, works: Seq[ScheduledSequence], tokens: Tensor, trials: RejectionResult) -> Tensor:
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


def told(
    works: Seq[ScheduledSequence], accepted: Seq[Accepted | None], answers: npt.NDArray[np.float64]
) -> dict[str, ReportedLogprobs]:
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
            parts[work.sequence.request.id] = ReportedLogprobs(_gathered(work), output)
    return {request_id: part for request_id, part in parts.items() if part.prompt or part.output}


def attached(chunks: Seq[Chunk], told: Mapping[str, ReportedLogprobs]) -> list[Chunk]:
    """The chunks of a step, each with what there is to tell of its tokens."""
    return [_attached(chunk, told[chunk.request_id]) if chunk.request_id in told else chunk for chunk in chunks]


def _attached(chunk: Chunk, told: ReportedLogprobs) -> Chunk:
    return replace(chunk, logprobs=told.output[: len(chunk.token_ids)], prompt_logprobs=told.prompt)


def _placed(works: Seq[ScheduledSequence]) -> Iterator[tuple[ScheduledSequence, int]]:
    """Each work with the first of its wanted rows."""
    start = 0
    for work in works:
        yield work, start
        start += work.num_wanted


def _asks(work: ScheduledSequence) -> bool:
    """Whether it is asked about the output of this step."""
    return work.sequence.request.sampling.logprobs is not None and work.emits


def _num_top(work: ScheduledSequence) -> int:
    return work.sequence.request.sampling.logprobs or 0


def _num_prompt_top(work: ScheduledSequence) -> int:
    return work.sequence.request.sampling.prompt_logprobs or 0


def _depth(work: ScheduledSequence) -> int:
    return work.tree.depth if work.tree else 0


def _shown(work: ScheduledSequence) -> list[int]:
    """The prompt tokens after the shown rows."""
    return work.sequence.tokens[work.first + 1 : work.first + 1 + work.num_shown]


def _about_prompt(work: ScheduledSequence, start: int) -> Ints:
    """Rows of logits and the tokens after them, [2, A]."""
    return np.stack([np.arange(start, start + work.num_shown), np.array(_shown(work), dtype=np.int64)])


def _about_paths(works: Seq[ScheduledSequence], tokens: Tensor, trials: RejectionResult) -> Tensor:
    """The same of all asking works' paths, whose drawn rows are placed among all wanted ones."""
    trees: dict[int, DraftTree] = {}
    shown: list[int] = []
    drawn = 0
    for work, start in _placed(works):
        if _asks(work):
            trees[drawn] = work.tree or DraftTree.root_only(work.sequence.tokens[-1])
            shown.append(start + work.num_shown - drawn)
        drawn += len(work.drawn)
    walked = accepted_paths(trees, tokens, trials)
    return torch.stack([walked.rows + upload(shown, tokens.device)[:, None], walked.tokens]).flatten(1)


def _entry(token: int, answer: Seq[float], num_top: int) -> TokenLogprob:
    """An answer for k likeliest, cut to so many as were asked for."""
    most = len(answer) // 2
    ids = tuple(map(int, answer[1 + most : 1 + most + num_top]))
    return TokenLogprob(token, answer[0], ids, tuple(answer[1 : 1 + num_top]))


def _gathered(work: ScheduledSequence) -> tuple[TokenLogprob, ...]:
    """Of the prompt, with the first token that nothing foretells; once, where it was asked for."""
    sequence = work.sequence
    if sequence.request.sampling.prompt_logprobs is None or sequence.num_emitted > 0:
        return ()
    return (TokenLogprob(sequence.tokens[0], None), *sequence.prompt_logprobs)
