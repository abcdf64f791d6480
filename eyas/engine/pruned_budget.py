"""Largest trees for every step, of which only the part is verified that pays. No output depends on it.

A drafter whose round takes as long for a small tree as for a large one always drafts the largest. A pass over few rows is
cheaper where rows cost compute, as on a CPU: a node is verified if it is likely enough for its row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from eyas.engine.draft_costs import CostModel, FixedDraftBudget, StepTimes, SurvivalModel
from eyas.engine.sequence import ScheduledSequence
from eyas.sampling.acceptance import VerifyOutput
from eyas.tree import DraftTree


class PrunedDraftBudget(FixedDraftBudget):
    """Trees of the largest size, without the nodes that cost more than they yield.

    Let B sequences have trees and P have none. Of all nodes, the m likeliest are verified for which
    a(m) - rate * verify(P + B + m) is largest. a is the expected number of accepted nodes, verify a table of seconds by
    rows, and rate the tokens per second of steps with trees. So the ratio of tokens and seconds becomes the largest
    (Dinkelbach's method).
    """

    FORGETTING = 0.97  # weight of a step in the rate after the next one
    VERIFY_STEPS = 4  # from one step whose pass corrects the table to the next: they are short

    def __init__(self, verify: CostModel) -> None:
        """verify: seconds by rows."""
        self._verify, self._survival = verify, SurvivalModel()
        self._num_tokens = self._seconds = 0.0  # of recent steps with trees
        self._num_steps, self._has_trees = 0, False

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        self._has_trees = bool(trees)
        if not trees or not self._seconds:
            return list(trees)
        nodes = np.concatenate([survival[1:] for survival in self._survival.survival(trees)])
        order = np.argsort(-nodes, kind="stable")  # ties go to the earlier node, hence parents before their children
        seconds = self._verify.at(num_plain + len(trees) + np.arange(len(nodes) + 1))
        gained = np.cumsum(np.append(0.0, nodes[order])) - self._num_tokens / self._seconds * seconds
        is_kept = np.zeros(len(nodes), np.bool_)
        is_kept[order[: int(np.argmax(gained))]] = True
        parts = np.split(is_kept, np.cumsum([tree.num_drafted for tree in trees])[:-1])
        return [
            tree if part.all() else tree.pruned([0, *(np.flatnonzero(part) + 1).tolist()])
            for tree, part in zip(trees, parts, strict=True)
        ]

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], times: StepTimes) -> None:
        wait_s, verify_s, between_s, host_s = times
        has_trees, self._has_trees = self._has_trees, False
        if not batch or any(scheduled.tree is None for scheduled in batch):  # with rows of prompts
            return
        self._num_steps += 1
        if self._num_steps % self.VERIFY_STEPS == 0:
            self._verify.observe(sum([len(scheduled.slots) for scheduled in batch]), verify_s)
        if not has_trees:
            return
        done = [(s.tree, o.accepted) for s, o in zip(batch, outputs, strict=True) if s.tree and o.accepted]
        self._survival.forget()
        self._survival.observe([tree for tree, _ in done], [accepted.path for _, accepted in done])
        seconds, num_tokens = wait_s + verify_s + (between_s or 0.0) + host_s, sum(len(a.tokens) for _, a in done)
        self._num_tokens = self.FORGETTING * self._num_tokens + num_tokens
        self._seconds = self.FORGETTING * self._seconds + seconds
