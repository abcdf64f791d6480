"""Rules that requests apply to their logits before the draw: masks of grammars, biases, penalties, bans, the end of a
reasoning that has used up its budget, in that order.

Masks are packed bits, computed on the host; the device unpacks them. They are the first thing that happens to the logits, so
that log-probabilities are those of the masked distribution, as in vLLM.

Every node of a tree follows its own history: the committed tokens, then its path in the tree. A lone root stands for a
request without a tree. All arithmetic is float32 and elementwise, so that no row's result depends on its neighbours.
Legend: R rows of a step's logits, M masked ones, N drawn ones, n of one request, V vocabulary, B bytes of a mask, D
different tokens that have occurred, W bad words, L tokens of history that they look at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.api.request import Request, SamplingParams
from eyas.arrays import Bools, Ints
from eyas.device.transfer import upload
from eyas.grammar.compiler import TokenBits
from eyas.protocol.commit import KnownLogitBias
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import Accepted, LogitRows
from eyas.sampling.reasoning_budget import NO_TOKEN, BudgetFollower

NOTHING_LEFT = "structured_outputs, together with bad words, biases or min_tokens, leaves no token to draw; ask for less"
# Levels of what applies for good.
ALL_LEVELS = 2**31 - 1


@dataclass(frozen=True)
class NodeMask:
    """Tokens that may be drawn at a node: bits of tokens [B]. must_end: whether these are only tokens
    that end the output.
    """

    bits: TokenBits
    must_end: bool = False

    def allows(self, token: int) -> bool:
        """Return whether the token may be drawn; one beyond the vocabulary stands for no token at all."""
        return token >> 3 < len(self.bits) and bool(self.bits[token >> 3] >> (token & 7) & 1)


@dataclass(frozen=True)
class TreeMasks:
    """The masks of one tree.

    Attributes:
        nodes: of each node, None where nothing is masked.
        unvisited: nodes that there was no time for; they are not accepted, nor what stands below them.
    """

    nodes: Seq[NodeMask | None]
    unvisited: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenMasks:
    """The masks of a step.

    Attributes:
        trees: by request id.
        errors: by request id, why a request has no masks.
    """

    trees: Mapping[str, TreeMasks] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def applied(self, logits: Tensor, batch: Seq[LogitRows]) -> Tensor:
        """Return all logits of the step [R, V] with minus infinity for tokens that may not be drawn; the given ones stay."""
        rows, masks, start = list[int](), list[TokenBits](), 0
        for request_rows in batch:
            start += len(request_rows.prompt_tokens)
            tree = None if request_rows.tree is None else self.trees.get(request_rows.request.id)
            for node, mask in enumerate(tree.nodes if tree else ()):
                if mask is not None:
                    rows.append(start + node)
                    masks.append(mask.bits)
            start += request_rows.num_drawn
        if not rows:
            return logits
        index = upload(rows, logits.device)
        allowed = unpacked(upload(np.stack(masks), logits.device), logits.shape[1])
        return logits.index_copy(0, index, logits[index].masked_fill(~allowed, -torch.inf))

    def must_end(self, request_id: str) -> Bools | None:
        """Return, for each node of a request's tree, whether only the end may follow; None if nothing is masked."""
        tree = self.trees.get(request_id)
        return None if tree is None else np.array([mask is not None and mask.must_end for mask in tree.nodes])

    def length(self, request_id: str, accepted: Accepted | None) -> int | None:
        """Return how many accepted nodes of a request come before one that there was no time for; None if all do."""
        tree = self.trees.get(request_id)
        if accepted is None or tree is None or not tree.unvisited:
            return None
        return next((place for place, node in enumerate(accepted.path) if node in tree.unvisited), None)

    def error(self, request_id: str, accepted: Accepted | None) -> str:
        """Return why a request cannot go on: it has no masks, or draws what they do not allow, as nothing else is left. Else
        empty.

        Below a token that ends the output nothing is masked, and what is drawn does not count.
        """
        tree = self.trees.get(request_id)
        if tree is not None and accepted is not None:
            for node, token in zip(accepted.path, accepted.tokens, strict=True):
                mask = tree.nodes[node]
                if mask is None:
                    break
                if not mask.allows(token):
                    return NOTHING_LEFT
        return self.errors.get(request_id, "") if accepted is not None else ""


def unpacked(bits: Tensor, vocab_size: int) -> Tensor:
    """Return the bits of masks uint8 [M, B] as bool [M, V]."""
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    flags = (bits[:, :, None] >> shifts & 1).flatten(1)
    return flags[:, :vocab_size].bool()


class LogitRules:
    """Rules of running requests for their logits. They count tokens where a penalty needs it. A request that asks for
    nothing costs nothing.

    Args:
        eos_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._rules: dict[str, _RequestRules | None] = {}  # None for requests that ask for nothing

    def applied(self, logits: Tensor, batch: Seq[LogitRows], masks: TokenMasks | None = None) -> Tensor:
        """Return the logits to draw from, float32 [N, V]; the given ones, of the drawn rows, stay as they are.

        masks: have been applied already. Where they leave only the end of the output, min_tokens does not ban it.
        """
        parts = list(self._parts(batch, logits, masks))
        if not parts:
            return logits
        masked, logits = logits, logits.clone()
        for part in parts:
            rows, ids = upload(_cells(part.indices, part.rules.bias_ids), logits.device)
            logits[rows, ids] += part.rules.biases.repeat(len(part.indices))
            _penalise(logits, part)
        rows, ids = upload(np.concatenate([cells for part in parts for cells in _banned(part)], axis=1), logits.device)
        logits[rows, ids] = logits.new_full((), -torch.inf)  # a number would be copied to the device, which waits
        for part in parts:
            _end_reasoning(logits, masked, part)
        return logits

    def known_biases(self, request: Request, tokens: Seq[int]) -> tuple[KnownLogitBias, ...]:
        """Return what is known now of the logits behind the committed `tokens`, for a drafter.

        Biases, bad words of one token, and the end of the output while it is too short; of longer bad words those that the
        next token would complete. Penalties are left out: they depend on the path.
        """
        sampling = request.sampling
        if not (sampling.logit_bias or sampling.bad_token_ids or sampling.min_tokens):
            return ()
        num_short = sampling.min_tokens - (len(tokens) - len(request.prompt_ids))
        banned = {word[0]: ALL_LEVELS for word in sampling.bad_token_ids if len(word) == 1}
        if num_short > 0:
            banned |= dict.fromkeys(sampling.end_ids(self._eos_ids) - banned.keys(), num_short)
        longer = [word for word in sampling.bad_token_ids if len(word) > 1]
        completed = {word[-1] for word in longer if tuple(tokens[1 - len(word) :]) == tuple(word[:-1])}
        banned |= dict.fromkeys(completed - banned.keys(), 1)
        biases = [KnownLogitBias(token, bias, ALL_LEVELS) for token, bias in sampling.logit_bias]
        return (*biases, *(KnownLogitBias(token, -math.inf, levels) for token, levels in banned.items()))

    def release(self, request_ids: Seq[str]) -> None:
        """Forget requests that have ended; unknown ids are ignored."""
        for request_id in request_ids:
            self._rules.pop(request_id, None)

    def _parts(self, batch: Seq[LogitRows], logits: Tensor, masks: TokenMasks | None) -> Iterator[_Part]:
        start = 0
        for rows in batch:
            request = rows.request
            if request.id not in self._rules:
                self._rules[request.id] = self._prepared(request, logits) if request.sampling.has_logit_rules else None
            rules = self._rules[request.id]
            if rows.tree is not None and rules is not None:
                must_end = masks.must_end(request.id) if masks else None
                yield _Part(request, rows.tokens, rows.tree, rules, start, must_end)
            start += rows.num_drawn

    def _prepared(self, request: Request, logits: Tensor) -> _RequestRules:
        sampling, num_prompt = request.sampling, len(request.prompt_ids) - request.num_emitted
        return _RequestRules(
            bias_ids=np.array([token for token, _ in sampling.logit_bias], dtype=np.int64),
            biases=upload(np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32), logits.device),
            end_ids=np.array(sorted(sampling.end_ids(self._eos_ids)), dtype=np.int64),
            bad_words=BadWords.of(sampling.bad_token_ids) if sampling.bad_token_ids else None,
            counts=TokenCounts(num_prompt, logits.shape[1]) if sampling.has_penalties else None,
            budget=BudgetFollower(sampling.reasoning_budget, num_prompt) if sampling.reasoning_budget else None,
        )


@dataclass(frozen=True)
class _RequestRules:
    """Rules of one request for its logits, prepared once. end_ids: tokens that are banned while the output is too short."""

    bias_ids: Ints
    biases: Tensor
    end_ids: Ints
    bad_words: BadWords | None
    counts: TokenCounts | None
    budget: BudgetFollower | None


@dataclass(frozen=True)
class _Part:
    """The drawn rows of a request with rules, from row `start` of the step.

    Attributes:
        must_end: rows where only the end of the output is left [n]; None for none.
    """

    request: Request
    tokens: Seq[int]
    tree: DraftTree
    rules: _RequestRules
    start: int
    must_end: Bools | None

    @property
    def indices(self) -> Ints:
        """The rows, [n]."""
        return np.arange(self.start, self.start + len(self.tree))


def _penalise(logits: Tensor, part: _Part) -> None:
    """Penalise, in place, tokens that have occurred."""
    counts, sampling = part.rules.counts, part.request.sampling
    if counts is None:
        return
    counts.update(part.tokens)
    tokens, occurrences = counts.along(part.tree)
    ids, output, prompted = (upload(array, logits.device) for array in (tokens, occurrences, counts.prompted[tokens]))
    rows = logits[part.start : part.start + len(part.tree)]
    rows[:, ids] = penalised(rows[:, ids], output, prompted, sampling)


def _banned(part: _Part) -> Iterator[Ints]:
    """Yield the tokens that would end the output before min_tokens, and those that would complete a bad word: their rows and
    ids, [2, m].
    """
    num_emitted = len(part.tokens) - len(part.request.prompt_ids) + np.array(part.tree.depths)
    is_short = num_emitted < part.request.sampling.min_tokens
    if part.must_end is not None:
        is_short &= ~part.must_end
    yield _cells(part.indices[is_short], part.rules.end_ids)
    if part.rules.bad_words is not None:
        nodes, ids = part.rules.bad_words.completed(part.tokens, part.tree)
        yield np.stack([part.start + nodes, ids])


def _end_reasoning(logits: Tensor, masked: Tensor, part: _Part) -> None:
    """Leave, in place, only the end of the reasoning where its budget is used up.

    masked: logits before all rules. A grammar may have no place for the end yet, as in the middle of a character.
    """
    if part.rules.budget is None:
        return
    tokens = part.rules.budget.forced(part.tokens, part.tree)
    is_forced = tokens != NO_TOKEN
    rows, ids = (upload(array[is_forced], logits.device) for array in (part.indices, tokens))
    ended = torch.full_like(logits[rows], -torch.inf).scatter(1, ids[:, None], 0)
    logits[rows] = ended.where(~torch.isneginf(masked[rows, ids])[:, None], logits[rows])


def _cells(rows: Ints, ids: Ints) -> Ints:
    """Return each of the ids in each of the rows, [2, m]."""
    return np.stack([np.repeat(rows, len(ids)), np.tile(ids, len(rows))])


def penalised(logits: Tensor, output: Tensor, prompted: Tensor, sampling: SamplingParams) -> Tensor:
    """Return logits [N, D] after repetition (Keskar et al. 2019, section 4.1), then frequency and presence penalty.

    Args:
        output: how often the token is in the row's output so far, float32 [N, D].
        prompted: whether it is in the prompt, [D]. Repetition looks at both, the other two at the output alone.
    """
    emitted = output > 0
    weakened = (logits / sampling.repetition_penalty).where(logits > 0, logits * sampling.repetition_penalty)
    repeated = weakened.where(emitted | prompted, logits)
    return repeated - sampling.frequency_penalty * output - sampling.presence_penalty * emitted


# Stands in a history before its first token.
NOTHING = -1


class TokenCounts:
    """Counts of each token in a sequence. Committed tokens are counted once, as they come.

    num_prompt: length of the prompt. prompted: whether the prompt holds each token [V].
    """

    def __init__(self, num_prompt: int, vocab_size: int) -> None:
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._ids: Ints = np.zeros(0, dtype=np.int64)
        self.prompted = np.zeros(vocab_size, dtype=np.bool_)
        self._output = np.zeros(vocab_size, dtype=np.float32)

    def update(self, tokens: Seq[int]) -> None:
        """Count the committed tokens that were not counted yet."""
        new = np.array(tokens[self._num_counted :], dtype=np.int64)
        num_prompt = max(self._num_prompt - self._num_counted, 0)
        self.prompted[new[:num_prompt]] = True
        np.add.at(self._output, new[num_prompt:], 1)
        self._ids = np.union1d(self._ids, new)
        self._num_counted = len(tokens)

    def along(self, tree: DraftTree) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Count the committed tokens and, for every node, those on its path.

        Returns the tokens that occur [D], and how often each occurs after the prompt, by node, float32 [n, D].
        """
        rows, nodes = np.nonzero(tree.ancestor_mask()[:, 1:])  # the root is a committed token
        drafted = np.array(tree.tokens[1:], dtype=np.int64)[nodes]
        ids = np.union1d(self._ids, drafted)
        output = np.tile(self._output[ids], (len(tree), 1))
        np.add.at(output, (rows, np.searchsorted(ids, drafted)), 1)
        return ids, output


def _tails(committed: Seq[int], tree: DraftTree, length: int) -> Ints:
    """Return the last `length` tokens of each node's history, the latest first; NOTHING before the first token. [n, L]."""
    committed = list(committed[-length:])
    tokens = np.array([NOTHING] * length + committed + list(tree.tokens[1:]), dtype=np.int64)
    root = length + len(committed) - 1
    before = np.arange(-1, len(tokens) - 1)
    before[root + 1 :] = root + np.array(tree.parents[1:], dtype=np.int64)
    at = root + np.arange(len(tree))
    columns = []
    for _ in range(length):
        columns.append(tokens[at])
        at = before[at]
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class BadWords:
    """Sequences that must not be completed.

    Attributes:
        heads: all but the last token of each, the latest first [W, L].
        free: where a head is shorter and any token fits [W, L].
        lasts: the last tokens [W].
    """

    heads: Ints
    free: Bools
    lasts: Ints

    @classmethod
    def of(cls, words: Seq[Seq[int]]) -> Self:
        longest = max(len(word) for word in words) - 1
        heads = np.full((len(words), max(longest, 1)), NOTHING, dtype=np.int64)
        for row, word in zip(heads, words, strict=True):
            row[: len(word) - 1] = word[-2::-1]
        return cls(heads, heads == NOTHING, np.array([word[-1] for word in words], dtype=np.int64))

    def completed(self, committed: Seq[int], tree: DraftTree) -> tuple[Ints, Ints]:
        """Return the tokens that would complete a bad word at a node: nodes and tokens, [m] each."""
        histories = _tails(committed, tree, self.heads.shape[1])
        met = ((histories[:, None] == self.heads) | self.free).all(-1)
        nodes, words = np.nonzero(met)
        return nodes, self.lasts[words]
