"""Steps under made-up costs. No time is measured."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from eyas.api.request import Request, SamplingParams
from eyas.config import TreeConfig
from eyas.engine.budget.adaptive import AdaptiveDraftBudget
from eyas.engine.budget.base import DraftBudget, NextStep, StepTimes
from eyas.engine.budget.costs import CostModel, DraftCosts
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.protocol.commit import NO_TREE, TreeBudget
from eyas.protocol.tree import DraftTree, SampledProposal
from eyas.sampling.acceptance import Accepted, StepOutputs
from tests.support.strategies import outputs_of

NODES = 8
CHAINS = TreeConfig(NODES, NODES - 1, 1)
DEFAULTS = SamplingParams()  # one for all requests: they are checked whenever they are made
SLOTS = np.zeros(1000, np.int64)  # room for more tokens than any tree has


@dataclass
class Simulation:
    """Steps of `batch` requests.

    A step costs `fixed` seconds, `row` for each node, and `draft` if trees were requested, with `behind` for each step whose
    tokens the drafter did not get yet, of each request. Each node of a chain is accepted with probability `right` if its
    parent is.
    available: whether the drafter answers. others: requests beside them that cannot have trees.
    gap: seconds between two steps, in which a drafter apart works too. host: further ones beside a step with trees.
    context, context_token: tokens of each request's context, and what each of them adds to a step.
    small: requests that ask for trees of two nodes at most. ending: requests with room for one more drafted token.
    sampled: requests whose trees are drawn, and how likely each of their nodes is accepted.
    phases: numbers of tokens and `right` of these, in turn; for one request.
    now, tokens: seconds that have passed and tokens that came out.
    """

    fixed: float = 1.0
    row: float = 0.0
    draft: float = 0.0
    right: float = 0.8
    batch: int = 1
    available: bool = True
    behind: float = 0.0
    others: int = 0
    gap: float | None = None
    host: float = 0.0
    context: int = 1
    context_token: float = 0.0
    small: int = 0
    ending: int = 0
    sampled: int = 0
    sampled_right: float = 0.0
    phases: tuple[tuple[int, float], ...] = ()
    num_missed: Counter[str] = field(default_factory=Counter)
    now: float = 0.0
    tokens: int = 0

    def budget(self, remote: bool = False) -> AdaptiveDraftBudget:
        """A budget that was warmed up under the present costs. remote: the drafter could not be timed."""
        sizes = (1, 4, 16, 64, 256)
        verify = CostModel(sizes, [self.fixed + self.row * rows for rows in sizes])
        first, level = (CostModel(sizes, [seconds] * len(sizes)) for seconds in (self.draft, 0.0))
        draft = DraftCosts(None, None, CHAINS.top_k) if remote else DraftCosts(first, level, CHAINS.top_k, self.behind)
        return AdaptiveDraftBudget(CHAINS, verify, draft, remote, self.context_token)

    def sizes(self, budget: DraftBudget, steps: int, seed: int = 0, most: int = NODES) -> list[int]:
        """The nodes that most requests got, step by step; 1 where only scouts have trees."""
        rng, names = random.Random(seed), [f"{number}" for number in range(self.batch)]
        step = NextStep(num_context_tokens=self.context * self.batch, missing=[self.num_missed[name] for name in names])
        without = {f"other {number}": NO_TREE for number in range(self.others)}
        chosen = [budget.choose(names, most, self.others, step)]
        for _ in range(steps):
            wait_s = max(self.wait_s(chosen[-1]) - (self.gap or 0.0), 0.0)
            batch, outputs = self.take_step(budget, chosen[-1] | without, rng)
            verify_s = self.fixed + self.row * sum(len(scheduled.slots) for scheduled in batch) + self._context_s
            other_s = (self.gap or 0.0) + (self.host if any(size.max_depth for size in chosen[-1].values()) else 0.0)
            budget.observe(batch, outputs, StepTimes(wait_s, verify_s, other_s))
            self.now += wait_s + verify_s + other_s
            step = step._replace(missing=[self.num_missed[name] for name in names])
            chosen.append(budget.choose(names, most, self.others, step))
        usual_sizes = []
        for sizes in chosen:  # the same size for all but scouts
            drafting = Counter(size for size in sizes.values() if size.max_depth)
            assert len(drafting) <= 2
            assert drafting.total() == self.batch or drafting.total() <= AdaptiveDraftBudget.MAX_TREES
            assert len(drafting) < 2 or drafting[max(drafting)] <= AdaptiveDraftBudget.MAX_TREES
            assert all(size.max_depth < size.max_nodes for size in drafting)
            usual_sizes.append(
                Counter(min(size.max_nodes, size.max_depth + 1) for size in sizes.values()).most_common(1)[0][0]
            )
        return usual_sizes

    def resized(self, batch: int) -> Simulation:
        """With another number of requests, which have their tokens from now on."""
        self.batch = batch
        self.num_missed.clear()
        return self

    def seconds_per_token(self, budget: DraftBudget, steps: int, seed: int = 0) -> float:
        """Seconds per token of the next steps."""
        self.now, self.tokens = 0.0, 0
        self.sizes(budget, steps, seed)
        return self.now / self.tokens

    def expected_seconds_per_token(self, nodes: int) -> float:
        """Seconds per token of steps with trees of one size, in the long run."""
        accepted = sum(self.right**depth for depth in range(nodes))
        seconds = self.fixed + self.row * (self.others + self.batch * nodes) + (self.draft if nodes > 1 else 0.0)
        seconds += self._context_s
        return seconds / (self.others + self.batch * accepted)

    @property
    def _context_s(self) -> float:
        return self.context_token * self.context * self.batch

    def take_step(
        self, budget: DraftBudget, sizes: dict[str, TreeBudget], rng: random.Random
    ) -> tuple[list[ScheduledSequence], StepOutputs]:
        trees = {name: self._tree(number, size) for number, (name, size) in enumerate(sizes.items())}
        came = [name for name, tree in trees.items() if sizes[name].max_depth and tree.sampled is None]
        trees |= zip(came, budget.prune([trees[name] for name in came], len(sizes) - len(came)), strict=True)
        batch, outputs = [], list[Accepted]()
        if self.phases:
            chances = [right for length, right in self.phases for _ in range(length)]
            self.right = chances[self.tokens % len(chances)]
        for number, (name, tree) in enumerate(trees.items()):
            right = self.sampled_right if number < self.sampled else self.right
            length = next((n for n in range(tree.num_drafted) if rng.random() >= right), tree.num_drafted)
            path = tuple(range(length + 1))
            request = Request(name, (1,), DEFAULTS, num_draft_tokens=2 if number < self.small else 0)
            sequence = Sequence(request, QueueKey(0.0, 0), [1], SLOTS[:4] if number < self.ending else SLOTS)
            batch.append(ScheduledSequence(sequence, np.arange(len(tree)), self.context, tree))
            outputs.append(Accepted(path, path))
            self.tokens += len(path)
        return batch, outputs_of(outputs)

    def _tree(self, number: int, size: TreeBudget) -> DraftTree:
        """The drafted tree of a request."""
        most = 1 if not self.available else 2 if number < max(self.small, self.ending) else NODES
        tree = chain_of(min(size.max_nodes, size.max_depth + 1, most))
        return tree.with_sampled(SampledProposal({})) if number < self.sampled else tree

    def wait_s(self, sizes: dict[str, TreeBudget]) -> float:
        """A drafter gets only sequences that have trees."""
        self.num_missed.update(sizes.keys())
        requested = [name for name, size in sizes.items() if size.max_depth]
        missed = sum(self.num_missed.pop(name) - 1 for name in requested)
        return self.draft + self.behind * missed if requested else 0.0


@cache
def chain_of(length: int) -> DraftTree:
    """The chain of that many nodes, with the arrays that were made of it."""
    return DraftTree.chain(range(length))


def usual(chosen: list[int]) -> int:
    """The size that is chosen most of the time."""
    return max(set(chosen), key=chosen.count)
