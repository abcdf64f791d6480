"""A running request: its tokens, its slots, and what the drafter has of it. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from eyas.api.request import Chunk, FinishReason, Request, TokenLogprob, VerifyStep, VerifyStepDetails
from eyas.cache.prefix_cache import CachedPrefix, PrefixCache, Slots, Tokens
from eyas.cache.slot_tables import TableId
from eyas.cache.states import StateStep
from eyas.engine.recurrent_states import SequenceStates
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import LogitRows, StepOutputs


@dataclass(frozen=True, order=True)
class QueueKey:
    """Place in the order of service: the smaller key goes first.

    Attributes:
        due: time of arrival in seconds, moved ahead by priority.
        number: breaks ties in favour of the earlier request.
    """

    due: float
    number: int


@dataclass(eq=False)
class Sequence:
    """A request and its state. Only the scheduler changes it.

    Attributes:
        key: place among the tenant's requests; it changes only when the request is admitted before more urgent ones.
        tokens: the prompt and all emitted tokens. The first `computed` of them have KV and features.
        slots: of the computed tokens, in order; behind them is room for the slots of all tokens that may follow.
        table: names the slot table that `slots` are: while it is the same, slots are added, and none changes.
        end_ids: tokens that end its output, known once it has some.
        prefix: the first of its slots, which the prefix cache owns; None while the sequence waits.
        states: of recurrent layers, while it runs; None for a target without such layers.
        prefilling: whether more than the last token lacks KV.
        cacheable: tokens that a cached prefix may cover: all but the last, whose logits are needed.
        num_cached: prompt tokens that the first admission found in the cache; None before it.
        drafted: committed length that the drafter is believed to have, in drafting epoch `epoch`.
        samples: the target's samples at the nodes of its last tree, if the drafter needs them.
        prompt_logprobs: of the prompt tokens computed so far from the second on, where the request asks for them.
    """

    request: Request
    key: QueueKey
    tokens: list[int]
    slots: Slots
    end_ids: frozenset[int] = frozenset()
    computed: int = 0
    table: TableId = (0, 0)
    prefix: CachedPrefix | None = None
    states: SequenceStates | None = None
    prefilling: bool = True
    num_cached: int | None = None
    drafted: int = 0
    epoch: int = 0
    samples: tuple[int, ...] = ()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cacheable: Tokens = field(init=False)

    def extend(self, slots: Slots) -> None:
        """Own the slots of the next computed tokens."""
        start = self.computed
        self.computed = end = start + len(slots)
        self.slots[start:end] = slots

    def share(self, cache: PrefixCache, limit: int) -> None:
        """Give what is computed to the prefix cache, `limit` tokens at most and none after a stop token."""
        assert self.prefix is not None
        count = min(self.computed, len(self.tokens), limit)
        tokens = np.array(self.tokens[:count], dtype=np.int64)
        self.prefix = cache.store(tokens, self.slots[:count], self.prefix, self.request.cache_salt)
        if not np.array_equal(self.slots[:count], self.prefix.slots):
            self.slots[:count] = self.prefix.slots
            self.table = self.key.number, self.table[1] + 1
        if self.states is not None:
            self.states.share(self.prefix)

    def leave(self, cache: PrefixCache, used: float, keeps_state: bool = True) -> None:
        """Give up all slots. used: time until which the prefix cache counts those that it owns as in use."""
        assert self.prefix is not None
        if self.states is not None:
            self.states.leave(self.prefix if keeps_state else None)
            self.states = None
        cache.free(self.own_slots)
        cache.release(self.prefix, used)
        self.prefix, self.computed = None, 0

    @property
    def own_slots(self) -> Slots:
        """The slots that the prefix cache does not own."""
        return self.slots[len(self.prefix.slots) if self.prefix else 0 : self.computed]

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def num_draftable(self) -> int:
        """Committed length that the drafter can get: one token more than there are features."""
        return min(self.computed + 1, len(self.tokens))

    @property
    def can_draft(self) -> bool:
        """Return whether the drafter lacks tokens that are computed, and there is room for a drafted one after them."""
        lacks_tokens = 0 < self.computed >= self.drafted < len(self.tokens)
        return lacks_tokens and len(self.tokens) + 1 < len(self.slots)


@dataclass(eq=False)
class ScheduledSequence:
    """One sequence's rows in a step: prompt tokens from position `first` on, or the nodes of a draft tree whose root is the
    token at `first`.

    Attributes:
        slots: one per row.
        tree: None for prompt tokens. It does not change.
        states: see Segment.
    """

    sequence: Sequence
    slots: Slots
    first: int
    tree: DraftTree | None = None
    states: StateStep | None = None

    @cached_property
    def drawn_tree(self) -> DraftTree | None:
        """The tree at whose nodes tokens are drawn: a lone root at the end of a prompt, None inside one."""
        is_end = self.first + len(self.slots) == len(self.sequence.tokens)
        return DraftTree.root_only(self.sequence.tokens[-1]) if self.tree is None and is_end else self.tree

    @cached_property
    def logit_rows(self) -> LogitRows:
        """The last of its rows, whose logits are needed. A token is drawn there, except inside a prompt."""
        sequence, tree, end = self.sequence, self.drawn_tree, self.first + len(self.slots)
        asks = sequence.request.sampling.prompt_logprobs is not None
        prompt_tokens: list[int] = []
        if asks and self.tree is None and sequence.num_emitted == 0:
            prompt_tokens = sequence.tokens[self.first + 1 : end + (tree is None)]
        return LogitRows(sequence.request, sequence.tokens, tree, prompt_tokens)


class DraftReply(NamedTuple):
    """Outcome of a sequence's draft request.

    Attributes:
        tree: None without a usable answer.
        drafted, epoch: the committed length that the drafter has now, and the epoch in which it goes on.
        is_edited: whether the tree is another one than the drafter's, which cannot use the target's samples then.
    """

    sequence: Sequence
    tree: DraftTree | None
    drafted: int
    epoch: int
    is_edited: bool = False


class Emitted(NamedTuple):
    """Tokens that a step adds to a request.

    Attributes:
        number: of the request in the step.
        token_ids: the tokens, cut at the end of the output.
        finish_reason: why the output ends with them; None if it goes on.
        prompt_logprobs: see Chunk.
        num_cached: see Chunk.
    """

    number: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached: int = 0


@dataclass(frozen=True, eq=False)
class Chunks(SequenceOf[Chunk]):
    """The chunks of a step for the readers of its requests, made when the first is read. So the next pass need not wait.

    Attributes:
        last: final chunks of requests that are cancelled or fail.
        batch, outputs: of the step.
        emitted: what its other requests get.
    """

    last: SequenceOf[Chunk]
    batch: SequenceOf[ScheduledSequence] = ()
    outputs: StepOutputs | None = None
    emitted: SequenceOf[Emitted] = ()

    @cached_property
    def ended(self) -> list[str]:
        """Ids of the requests that end with the step."""
        finished = [self.batch[each.number].sequence.request.id for each in self.emitted if each.finish_reason is not None]
        return [*(chunk.request_id for chunk in self.last), *finished]

    def __len__(self) -> int:
        return len(self.last) + len(self.emitted)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return self._chunks[index]

    @cached_property
    def _chunks(self) -> list[Chunk]:
        chunks = list(self.last)
        outputs = self.outputs
        if outputs is None:
            return chunks
        levels = outputs.levels.tolist()
        ends = [0, *outputs.ends.tolist()]
        for number, tokens, reason, prompt_logprobs, num_cached in self.emitted:
            request, tree = self.batch[number].sequence.request, self.batch[number].tree
            step = None
            num_drafted = min(len(tokens), ends[number + 1] - ends[number] - 1)
            if tree is not None:
                details = None
                if request.return_verify_steps:
                    path = tuple(outputs.nodes[ends[number] + 1 : ends[number] + 1 + num_drafted].tolist())
                    details = VerifyStepDetails(tree.tokens, tree.parents, tree.log_probs, path, tree.sources)
                step = VerifyStep(tree.num_nodes - 1, levels[number], num_drafted, tree.grown_ahead, details)
            own = outputs.details.get(number)
            chunk = Chunk(
                request_id=request.id,
                token_ids=tokens,
                is_draft_token=(True,) * num_drafted + (False,) * (len(tokens) - num_drafted),
                verify_step=step,
                finish_reason=reason,
                logprobs=own.logprobs[: len(tokens)] if own else (),
                prompt_logprobs=prompt_logprobs,
                num_cached=num_cached,
            )
            chunks.append(chunk)
        return chunks
