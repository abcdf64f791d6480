"""A request on its way: tokens, slots and what the drafter knows of it. Integers only; knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from eyas.cache.slots import Slots
from eyas.request import Request, TokenLogprob
from eyas.tree import DraftTree


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and everything emitted. The first `computed` of them have KV and features, in `slots`, in order.

    drafted: committed length that the drafter is believed to have. samples: target samples at the nodes of the last tree.
    failure: why the sequence cannot go on; empty while it can.
    prompt_logprobs: where the request asks for them, of the prompt tokens from the second on, as far as they are computed.
    """

    request: Request
    tokens: list[int]
    slots: Slots
    computed: int = 0
    drafted: int = 0
    epoch: int = 0
    samples: tuple[int, ...] = ()
    cancelled: bool = False
    failure: str = ""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @classmethod
    def start(cls, request: Request) -> Sequence:
        return cls(request, list(request.prompt_ids), np.zeros(0, dtype=np.int64))

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

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


@dataclass(frozen=True)
class Work:
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
