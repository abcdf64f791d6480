"""The draft budget of a network next to lookups."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from eyas.engine.budget.adaptive import AdaptiveDraftBudget
from eyas.engine.budget.base import DECODE_ONLY, NextStep, StepTimes
from eyas.engine.sequence import ScheduledSequence
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import StepOutputs


class PairDraftBudget:
    """Trees of both drafters while these pay, else trees of the lookups alone while those do.

    Trees of both have to yield more than the lookups did when these drafted alone last, which they do in single steps too,
    after twice as many steps each time. The network lacks the tokens of sequences for which lookups drafted alone, and
    catches up when both draft.

    Args:
        has_lookups: says whether there are lookups next to a network. A drafter in another process may be another one later.
    """

    num_nodes = 1
    lookups_alone = False
    FIRST_TURN, MAX_TURN = 8, 512  # steps with trees of both before the lookups draft alone in one

    def __init__(
        self, both: AdaptiveDraftBudget, lookups: AdaptiveDraftBudget, has_lookups: Callable[[], bool] = lambda: True
    ) -> None:
        self._both, self._lookups, self._has_lookups = both, lookups, has_lookups
        self._turn = self.FIRST_TURN
        self._num_since = 0  # steps with trees of both since the lookups drafted alone

    @property
    def _active(self) -> AdaptiveDraftBudget:
        return self._lookups if self.lookups_alone else self._both

    @property
    def takes_prompts(self) -> bool:
        return self._both.takes_prompts

    def choose(
        self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY
    ) -> dict[str, TreeBudget]:
        has_lookups = self._has_lookups()
        self._both.compare_with(self._lookups.gain if has_lookups else 1.0)
        # in a step with prompts the network would then lack all of these
        is_turn = has_lookups and self._num_since >= self._turn and not step.num_prompt_rows
        sizes = self._both.choose([] if is_turn else decoding, most, num_plain, step)
        # a step with prompts may leave trees of both out, and the network would then lack the tokens of all sequences
        self.lookups_alone = is_turn or (has_lookups and self._both.num_nodes == 1 and not self._both.is_on)
        if self.lookups_alone:
            sizes = self._lookups.choose(decoding, most, num_plain, step._replace(missing=()))
        self._num_since = 0 if self.lookups_alone else self._num_since + (self._both.num_nodes > 1)
        if is_turn:
            self._turn = min(2 * self._turn, self.MAX_TURN)
        self.num_nodes = self._active.num_nodes
        return sizes

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        return self._active.prune(trees, num_plain)

    def observe(self, batch: Seq[ScheduledSequence], outputs: StepOutputs, times: StepTimes) -> None:
        self._active.observe(batch, outputs, times)
        if self.lookups_alone:
            self._both.observe(batch, outputs, times)  # as a step without trees, after which it may try again
