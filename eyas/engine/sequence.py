"""A request on its way: tokens, slots and what the drafter knows of it. Integers only; knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eyas.cache.slots import Slots
from eyas.request import Request


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and everything emitted. The first `computed` of them have KV and features, in `slots`, in order.

    drafted: committed length that the drafter is believed to have. samples: target samples at the nodes of the last tree.
    """

    request: Request
    tokens: list[int]
    slots: Slots
    computed: int = 0
    drafted: int = 0
    epoch: int = 0
    samples: tuple[int, ...] = ()
    cancelled: bool = False

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
    """What one sequence does in a step. slots: one per row. Prefill rows are prompt tokens from `first` on; a decode
    row is a node of a draft tree of at most max_nodes nodes (root included) and max_depth levels."""

    sequence: Sequence
    slots: Slots
    first: int
    prefill: bool
    max_nodes: int = 1
    max_depth: int = 0

    @property
    def emits(self) -> bool:
        """Whether the step ends with a sample: always, but for a prompt chunk that is not the last."""
        return not self.prefill or self.first + len(self.slots) == len(self.sequence.tokens)


@dataclass(frozen=True)
class Batch:
    """The work of one step, in order of rows."""

    works: tuple[Work, ...] = field(default=())
