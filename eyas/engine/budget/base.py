"""Defines the `DraftBudget` protocol, `FixedDraftBudget`, and what budgets are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol

from eyas.engine.sequence import ScheduledSequence
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import StepOutputs


class StepTimes(NamedTuple):
    """Seconds of a step.

    Attributes:
        wait: to request its trees and to get them.
        verify: of the forward pass and of acceptance.
        other: of all else since the step before was observed, or since this one began if nothing was to be done between.
    """

    wait: float
    verify: float
    other: float = 0.0


class CostTimer:
    """Times the parts of steps for a budget.

    clock: the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = {"draft": 0.0, "pass": 0.0}
        self._since: float | None = None  # when a step was observed last; None if there was nothing to do since

    def begin(self) -> None:
        """Begin a step, which the request for its trees belongs to."""
        self._seconds["pass"] = 0.0
        if self._since is None:
            self._since = self._clock() - self._seconds["draft"]

    @contextmanager
    def timed(self, part: Literal["draft", "pass"]) -> Iterator[None]:
        """Add time to a part: to request trees and to wait for them, or to run a pass and accept its tokens."""
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[part] += self._clock() - began

    def step(self) -> StepTimes:
        """Return the times of the step so far; the rest of it counts for the next one."""
        now, since = self._clock(), self._since
        assert since is not None, "a step has begun"
        draft_s, pass_s = self._seconds["draft"], self._seconds["pass"]
        self._since, self._seconds["draft"] = now, 0.0
        return StepTimes(draft_s, pass_s, now - since - draft_s - pass_s)

    def pause(self) -> None:
        """Leave out the time until the next request for trees."""
        self._since, self._seconds["draft"] = None, 0.0


class NextStep(NamedTuple):
    """Facts about the next step besides its rows.

    Attributes:
        num_prefilling: sequences inside their prompts.
        num_prompt_rows: that the step computes of these.
        num_context_tokens: cached tokens that its rows attend to, of all sequences together.
        missing: tokens that the drafter lacks of each sequence that can have a tree; empty where that does not matter.
    """

    num_prefilling: int = 0
    num_prompt_rows: int = 0
    num_context_tokens: int = 0
    missing: Seq[int] = ()


DECODE_ONLY = NextStep()


class DraftBudget(Protocol):
    """Chooser of the sizes of draft trees.

    Attributes:
        num_nodes: most nodes of the trees chosen last, the root included; 1 only if no request drafts.
        lookups_alone: whether a pair of drafters leaves out the one that runs a network, see Commit.
    """

    num_nodes: int
    lookups_alone: bool

    @property
    def takes_prompts(self) -> bool:
        """Return whether prompts are worth sending to a drafter, as trees may follow soon."""
        ...

    def choose(
        self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY
    ) -> dict[str, TreeBudget]:
        """Return the largest next tree of each request, of at most `most` nodes.

        Args:
            decoding: requests that can have a tree.
            num_plain: requests that decode in the same step and cannot.
        """
        ...

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        """Return the parts to verify of deterministic trees that came; the same objects if nothing is left out.

        num_plain: requests that decode in the same step.
        """
        ...

    def observe(self, batch: Seq[ScheduledSequence], outputs: StepOutputs, times: StepTimes) -> None: ...


class FixedDraftBudget:
    """Budget that always allows the largest trees."""

    num_nodes = 1
    takes_prompts = True
    lookups_alone = False

    def choose(
        self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY
    ) -> dict[str, TreeBudget]:
        self.num_nodes = most
        return dict.fromkeys(decoding, TreeBudget(most, most))

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        return list(trees)

    def observe(self, batch: Seq[ScheduledSequence], outputs: StepOutputs, times: StepTimes) -> None: ...
