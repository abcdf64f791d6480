"""Measures a round of drafters without a network, and of merging two trees, by sessions and nodes.

Writes a dated report: `python -m benchmarks.scripts.lookup_rounds`. No target runs; sessions walk through the demo prompts.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from eyas.bench.report import Report, Table, number
from eyas.config import CombinedConfig, LookaheadConfig, PromptLookupConfig, TreeConfig
from eyas.drafters.base import DraftContext, LocalDrafter
from eyas.drafters.combined import merge_trees
from eyas.drafters.lookup.lookahead import LookaheadDrafter
from eyas.drafters.lookup.prompt_lookup import prompt_lookup
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree

PROMPTS = Path("models/demo/prompts.jsonl")
NUM_WARM_UPS = 5
TOKENS_PER_ROUND = 2
# Tokens of a session's first commit.
START = 500


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        repeats: measured rounds of each case.
    """

    repeats: int
    trees: tuple[TreeConfig, ...] = (TreeConfig(24, 6), TreeConfig(60, 12))
    sessions: tuple[int, ...] = (1, 8, 32)


@dataclass(frozen=True)
class RoundCost:
    """Median processor time of a round, all sessions together, in milliseconds."""

    what: str
    num_nodes: int
    num_sessions: int
    ms: float


class SimulatedSession:
    """A session that repeats the prompts from its own start. The target's samples are random."""

    def __init__(self, number: int, budget: TreeBudget) -> None:
        lines = PROMPTS.read_text(encoding="utf-8").splitlines()
        self._text = [token for line in lines for token in json.loads(line)["token_ids"]]
        self._number, self._budget = number, budget
        self._random = random.Random(number)
        self._committed = 0

    def step(self, num_nodes: int) -> DraftContext:
        """Return the next commit; num_nodes: of the last tree, 0 if there was none."""
        base, self._committed = self._committed, max(self._committed + TOKENS_PER_ROUND, START)
        places = [(100 * self._number + place) % len(self._text) for place in range(base, self._committed)]
        tokens, samples = (self._text[place] for place in places), self._random.choices(self._text, k=num_nodes)
        return Commit(f"{self._number}", 0, base, tuple(tokens), None, NoiseKey(0), self._budget, tuple(samples))


class TimedProposals:
    """A drafter whose rounds are timed."""

    def __init__(self, drafter: LocalDrafter) -> None:
        self._drafter = drafter
        self.seconds: list[float] = []

    def propose(self, contexts: list[DraftContext]) -> list[DraftTree]:
        """Return the trees of sessions that are never evicted."""
        started = time.process_time()
        drafts = self._drafter.propose(contexts)
        self.seconds.append(time.process_time() - started)
        return [draft for draft in drafts if isinstance(draft, DraftTree)]


def main(
    repeats: Annotated[int, typer.Option(help="Measured rounds of each case.")] = 100,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure every case in turn."""
    torch.set_num_threads(1)
    settings = Settings(repeats)
    costs = [cost for tree in settings.trees for n in settings.sessions for cost in measure(tree, n, repeats)]
    program = "python -m benchmarks.scripts.lookup_rounds"
    Report.here("lookup-rounds", program, "cpu", settings, costs, [table(costs)]).publish(out)


def measure(tree: TreeConfig, num_sessions: int, repeats: int) -> list[RoundCost]:
    """Measure two drafters, and the merging of their trees, over the same rounds."""
    budget = TreeBudget(tree.num_draft_tokens, tree.num_steps)
    lookup, lookahead = (
        TimedProposals(prompt_lookup(tree, PromptLookupConfig())),
        TimedProposals(LookaheadDrafter(tree, LookaheadConfig())),
    )
    simulated, sizes, merging = (
        [SimulatedSession(session, budget) for session in range(num_sessions)],
        [0] * num_sessions,
        [],
    )
    for _ in range(NUM_WARM_UPS + repeats):
        contexts = [each.step(size) for each, size in zip(simulated, sizes, strict=True)]
        found, drawn = lookup.propose(contexts), lookahead.propose(contexts)
        pairs, roots = list(zip(found, drawn, strict=True)), [context.tokens[-1] for context in contexts]
        started = time.process_time()
        merge_trees(roots, pairs, [budget] * num_sessions, CombinedConfig.min_share)
        merging.append(time.process_time() - started)
        sizes = [len(draft) for draft in drawn]
    seconds = {"prompt_lookup": lookup.seconds, "lookahead": lookahead.seconds, "merging the two": merging}
    medians = {what: 1e3 * float(np.median(times[NUM_WARM_UPS:])) for what, times in seconds.items()}
    return [RoundCost(what, tree.num_draft_tokens, num_sessions, ms) for what, ms in medians.items()]


def table(costs: list[RoundCost]) -> Table:
    """Return the table of the report."""
    rows = tuple(
        (cost.what, f"{cost.num_nodes}", f"{cost.num_sessions}", number(cost.ms), number(cost.ms / cost.num_sessions))
        for cost in sorted(costs, key=lambda cost: cost.what)
    )
    note = f"From contexts of {START} tokens and more to trees: median processor time of the one thread, ms."
    return Table("Round", ("what", "nodes", "sessions", "all sessions", "each session"), rows, note)


if __name__ == "__main__":
    typer.run(main)
