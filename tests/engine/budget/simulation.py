"""Steps under made-up costs. No time is measured."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from eyas.engine.draft_budget import AdaptiveDraftBudget
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.request import Request
from eyas.sampling.acceptance import Accepted
from eyas.tree import DraftTree

NODES = 8


@dataclass
class World:
    """Steps of `batch` requests. A step costs `fixed`, `row` for each node, and `draft` where trees were asked for, with
    `behind` for each step that a drafter so asked was not told of; its chains go on being right with probability `right`.
    available: whether the drafter answers. others: requests beside them that can have no tree."""

    fixed: float = 1.0
    row: float = 0.0
    draft: float = 0.0
    right: float = 0.8
    batch: int = 1
    available: bool = True
    behind: float = 0.0
    others: int = 0
    num_untold: Counter[str] = field(default_factory=Counter)
    now: float = 0.0
    tokens: int = 0

    def step(self, sizes: dict[str, int], rng: random.Random) -> tuple[list[ScheduledSequence], list[Accepted | None]]:
        """What the engine would have to say of a step with trees of these sizes."""
        works, accepted = [], list[Accepted | None]()
        for name, size in sizes.items():
            tree = DraftTree.chain(range(size if self.available else 1))
            length = next((n for n in range(tree.num_drafted) if rng.random() >= self.right), tree.num_drafted)
            path = tuple(range(length + 1))
            works.append(
                ScheduledSequence(Sequence.start(Request(name, (1,)), QueueKey(0.0, 0)), np.arange(len(tree)), 1, tree)
            )
            accepted.append(Accepted(path, path))
            self.tokens += len(path)
        return works, accepted

    def wait(self, sizes: dict[str, int]) -> float:
        """For the drafter, which is told of those that have trees alone."""
        self.num_untold.update(sizes.keys())
        asked = [name for name, size in sizes.items() if size > 1]
        behind = max((self.num_untold.pop(name) - 1 for name in asked), default=0)
        return self.draft + self.behind * behind if asked else 0.0

    def sizes(self, budget: AdaptiveDraftBudget, steps: int, seed: int = 0, most: int = NODES) -> list[dict[str, int]]:
        """The sizes that were chosen, step by step."""
        rng, names = random.Random(seed), [f"{number}" for number in range(self.batch)]
        treeless = {f"other {number}": 1 for number in range(self.others)}
        chosen = [budget.choose(names, most, self.others)]
        for _ in range(steps):
            wait = self.wait(chosen[-1])
            budget.drafted(wait)
            works, accepted = self.step(chosen[-1] | treeless, rng)
            verify = self.fixed + self.row * sum(len(work.slots) for work in works)
            budget.verified(works, accepted, verify)
            self.now += wait + verify
            chosen.append(budget.choose(names, most, self.others))
        return chosen

    def run(self, budget: AdaptiveDraftBudget, steps: int, seed: int = 0, most: int = NODES) -> list[int]:
        """The size that most requests had, step by step."""
        return [usual(list(sizes.values())) for sizes in self.sizes(budget, steps, seed, most)]

    def tokens_per_second(self, nodes: int) -> float:
        """What it would be in the long run with trees of one size."""
        expected = sum(self.right**depth for depth in range(nodes))
        draft = self.draft if nodes > 1 else 0.0
        rows = self.others + self.batch * nodes
        return (self.others + self.batch * expected) / (self.fixed + self.row * rows + draft)


def usual(chosen: list[int]) -> int:
    """The size that is chosen most of the time."""
    return max(set(chosen), key=chosen.count)
