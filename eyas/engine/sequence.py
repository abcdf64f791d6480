"""A request on its way: tokens, slots and what the drafter knows of it. Integers only; knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from eyas.cache.prefix_cache import CachedPrefix, PrefixCache, Slots, Tokens
from eyas.request import Request, TokenLogprob
from eyas.tree import DraftTree


@dataclass(frozen=True, order=True)
class QueueKey:
    """Whose turn it is: smaller goes first. due: time of arrival, moved ahead by priority; number: of equals the first."""

    due: float
    number: int


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and everything emitted. The first `computed` of them have KV and features, in `slots`, in order.

    place: among the others, for good. prefix: the first of its slots, which the prefix cache owns; None while it
    does not run. cacheable: what the cache may spare it: all tokens but the last, whose logits are wanted. num_cached:
    prompt tokens that it did spare.
    drafted: committed length that the drafter is believed to have. samples: target samples at the nodes of the last tree.
    failure: why the sequence cannot go on; empty while it can.
    prompt_logprobs: where the request asks for them, of the prompt tokens from the second on, as far as they are computed.
    """

    request: Request
    place: QueueKey
    tokens: list[int]
    computed: int = 0
    prefix: CachedPrefix | None = None
    num_cached: int | None = None
    drafted: int = 0
    epoch: int = 0
    samples: tuple[int, ...] = ()
    cancelled: bool = False
    failure: str = ""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cacheable: Tokens = field(init=False)
    _room: Slots = field(init=False)

    def __post_init__(self) -> None:
        self._room = np.empty(len(self.request.prompt_ids) + self.request.sampling.max_tokens, dtype=np.int64)
        self.cacheable = self._cacheable()

    @classmethod
    def start(cls, request: Request, place: QueueKey) -> Sequence:
        return cls(request, place, list(request.prompt_ids))

    def begin(self, prefix: CachedPrefix) -> None:
        """Run from a cached prefix on."""
        self.prefix, self.computed = prefix, len(prefix)
        self._room[: self.computed] = prefix.slots
        if self.num_cached is None:
            self.num_cached = self.computed

    def extend(self, slots: Slots) -> None:
        """Own the slots of the next computed tokens."""
        self._room[self.computed : self.computed + len(slots)] = slots
        self.computed += len(slots)

    def share(self, cache: PrefixCache, limit: int) -> None:
        """Let others begin with what is computed, `limit` tokens at most. What lies behind a stop does not count."""
        assert self.prefix is not None
        count = min(self.computed, len(self.tokens), limit)
        tokens = np.array(self.tokens[:count], dtype=np.int64)
        self.prefix = cache.store(tokens, self.slots[:count], self.prefix)
        self._room[:count] = self.prefix.slots

    def leave(self, cache: PrefixCache, limit: int, used: float) -> None:
        """Give up all slots, of which the cache keeps `limit` at most. used: until when it is to think them of use."""
        self.share(cache, limit)
        self._give_up(cache, used)

    def discard(self, cache: PrefixCache) -> None:
        """Give up all slots; what the cache does not have yet is lost."""
        assert self.prefix is not None
        self._give_up(cache, self.prefix.node.used)

    def start_over(self) -> None:
        """Compute anew what the cache does not spare, and tell the drafter everything, in a new epoch."""
        self.drafted, self.epoch, self.samples = 0, self.epoch + 1, ()
        self.cacheable = self._cacheable()

    @property
    def slots(self) -> Slots:
        """One slot for each computed token."""
        return self._room[: self.computed]

    @property
    def own_slots(self) -> Slots:
        """Those slots that the prefix cache does not own."""
        return self._room[len(self.prefix) if self.prefix else 0 : self.computed]

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def num_slots(self) -> int:
        """Slots that it needs for all its tokens, if it emits as many as it may."""
        return len(self._room)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.sampling.max_tokens - self.num_emitted

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token lacks KV."""
        return self.computed < len(self.tokens) - 1 or self.num_emitted == 0

    @property
    def known(self) -> int:
        """Committed length that a drafter may be told: one more token than there are features."""
        return min(self.computed + 1, len(self.tokens))

    def _cacheable(self) -> Tokens:
        """Nothing while the logits of all prompt tokens are wanted."""
        shown = self.request.sampling.prompt_logprobs is not None and self.num_emitted == 0
        return np.array([] if shown else self.tokens[:-1], dtype=np.int64)

    def _give_up(self, cache: PrefixCache, used: float) -> None:
        assert self.prefix is not None
        cache.free(self.own_slots)
        cache.release(self.prefix, used)
        self.prefix, self.computed = None, 0


@dataclass(frozen=True)
class ScheduledSequence:
    """What one sequence does in a step: rows of prompt tokens from position `first` on, or the nodes of a draft tree below
    the token at `first`. slots: one per row. tree: None for prompt rows."""

    sequence: Sequence
    slots: Slots
    first: int
    tree: DraftTree | None = None

    @property
    def emits(self) -> bool:
        """Whether the step ends with a sample: always, but for a prompt chunk that is not the last."""
        return self.tree is not None or self.first + len(self.slots) == len(self.sequence.tokens)

    @property
    def drawn(self) -> Seq[int]:
        """For each row whose logits are wanted, the absolute position of the token that it guesses."""
        if self.tree is not None:
            return [self.first + depth + 1 for depth in self.tree.depths]
        return [self.first + len(self.slots)] if self.emits else []

    @property
    def num_shown(self) -> int:
        """Rows before the drawn one whose logits are wanted too: a prompt's, if its log-probabilities are asked for."""
        if self.tree is not None or self.sequence.num_emitted > 0:
            return 0
        asked = self.sequence.request.sampling.prompt_logprobs is not None
        return len(self.slots) - len(self.drawn) if asked else 0

    @property
    def num_wanted(self) -> int:
        """The last so many rows are those whose logits are wanted."""
        return self.num_shown + len(self.drawn)
