"""How large the draft trees of the next step may be. No output depends on it.

`AdaptiveDraftBudget` takes the size with the most tokens per second. With B sequences that can have trees of k nodes, and P
that cannot, a step takes verify(P + B * rows(k)) + draft(B) seconds, the latter only if k > 1, and yields P + B * tokens(k)
tokens. verify and draft are tables of seconds, measured at start and refined by every step; rows and tokens are means by a
node's rank. A node's rank is its place in its tree by score, the root's is 0: a drafter with a smaller budget leaves out the
last ranks.

When the trees are there, their scores say more than ranks. Over all trees together the nodes most likely to be accepted are
verified, as many as yield the most tokens per second. How likely a score is accepted is learned from what was verified.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eyas.engine.sequence import ScheduledSequence
from eyas.sampling.acceptance import VerifyOutput
from eyas.tree import DraftTree

Floats = npt.NDArray[np.float64]


class DraftBudget(Protocol):
    """Chooses sizes of draft trees.

    num_nodes: the size chosen last, the root included. tokens_per_s: see TreeBudget.
    """

    num_nodes: int
    tokens_per_s: float

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        """Most nodes of the next tree of each request, the root included, 1 to `most`.

        decoding: requests that can have a tree. num_plain: requests that decode beside them and cannot.
        """
        ...

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        """The parts to verify of deterministic trees that came; the same objects where nothing is left out.

        num_plain: requests that decode beside them.
        """
        ...

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], wait_s: float, verify_s: float) -> None:
        """Take note of a step. wait_s: seconds until its trees were there. verify_s: seconds from there to its end."""
        ...


class FixedDraftBudget:
    """Always the largest trees."""

    num_nodes = 1
    tokens_per_s = 0.0

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        self.num_nodes = most
        return dict.fromkeys(decoding, most)

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        return list(trees)

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], wait_s: float, verify_s: float) -> None: ...


class CostModel:
    """Seconds by size: a table, interpolated between its sizes and extended along its last slope beyond them.

    Seconds never fall with size. A table without sizes is empty: it expects 0 seconds until the first observation.
    """

    # A measurement counts as this multiple of the expected seconds at most: a pause of the machine is not a cost of size.
    MAX_SURPRISE = 3.0
    # Weight of a measurement at sizes far from its own, relative to its own: machines slow down for all sizes together.
    FAR_WEIGHT = 0.5

    def __init__(self, sizes: Seq[float], seconds: Seq[float], rate: float) -> None:
        """sizes: ascending. rate: weight of a new measurement against what the table holds, in (0, 1]."""
        self._sizes: Floats = np.array(sizes, dtype=np.float64)
        self._seconds: Floats = np.maximum.accumulate(np.array(seconds, dtype=np.float64))
        self._rate = rate

    def at(self, size: npt.ArrayLike) -> Floats:
        """Expected seconds of each size."""
        sizes = np.asarray(size, dtype=np.float64)
        if not len(self._sizes):
            return np.zeros(sizes.shape)
        if len(self._sizes) == 1:
            return np.full(sizes.shape, self._seconds[0])
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        inside: Floats = np.interp(sizes, self._sizes, self._seconds)
        extended: Floats = inside + slope * np.maximum(sizes - self._sizes[-1], 0.0)
        return extended

    def observe(self, size: float, seconds: float) -> None:
        """Move the table towards a measurement, by ratios, most near its size."""
        if not len(self._sizes):
            self._sizes, self._seconds = np.array([size]), np.array([seconds])
            return
        expected = max(float(self.at(size)), 1e-9)
        ratio = min(max(seconds, 1e-9) / expected, self.MAX_SURPRISE)
        near: Floats = np.array([np.interp(size, self._sizes, unit) for unit in np.eye(len(self._sizes))])
        weights = self.FAR_WEIGHT + (1 - self.FAR_WEIGHT) * near
        self._seconds = np.maximum.accumulate(self._seconds * ratio ** (self._rate * weights))


class AcceptanceModel:
    """How often nodes come and are accepted, by rank: means over the trees drafted lately, beginning with a prior.

    The prior is a good drafter, so that what was never or not lately drafted seems worth a try.
    """

    FORGETTING = 0.98  # weight of a step's trees after the next step with trees
    PRIOR_ACCEPTANCE = 0.9  # of rank 1; rank i has this to the power of i
    PRIOR_TREES = 1.0  # trees that the prior counts for

    def __init__(self, max_nodes: int) -> None:
        self._prior: Floats = np.power(self.PRIOR_ACCEPTANCE, np.arange(max_nodes)).astype(np.float64)
        self._requested: Floats = np.zeros(max_nodes)
        self._came: Floats = np.zeros(max_nodes)
        self._accepted: Floats = np.zeros(max_nodes)

    def forget(self) -> None:
        """Let earlier trees count a little less, once for each step with trees."""
        for counts in (self._requested, self._came, self._accepted):
            counts *= self.FORGETTING

    def observe(self, num_requested: int, tree: DraftTree, path: Seq[int]) -> None:
        """Count a tree that was requested with `num_requested` nodes. path: its accepted nodes, the root first."""
        self._requested[:num_requested] += 1
        self._came[: len(tree)] += 1
        if len(path) > 1:
            ranks = np.argsort(np.argsort(-np.array(tree.log_probs), kind="stable"))
            self._accepted[ranks[list(path)]] += 1

    def tokens(self, most: int) -> Floats:
        """Expected tokens of a verify step, bonus included, with trees of 1 up to `most` nodes."""
        means = (self._accepted + self.PRIOR_TREES * self._prior) / (self._requested + self.PRIOR_TREES)
        return 1 + np.cumsum(np.append(0.0, means[1:most]))

    def rows(self, most: int) -> Floats:
        """Expected nodes of a tree when 1 up to `most` are requested: a drafter may have fewer."""
        means = (self._came + self.PRIOR_TREES) / (self._requested + self.PRIOR_TREES)
        return 1 + np.cumsum(np.append(0.0, means[1:most]))


class SurvivalModel:
    """How likely a node is accepted, by its score: means over the nodes verified lately, beginning with what scores claim.

    Scores are cumulative log-probabilities. Those of the drafters with a network are calibrated, other ones only rank.
    """

    FORGETTING = 0.98  # weight of a step's nodes after the next step with trees
    PRIOR_NODES = 8.0  # nodes of each bin that the prior counts for
    EDGES = np.concatenate([[-np.inf], np.arange(-8.0, -2.0, 1.0), np.arange(-2.0, -0.2, 0.25), [-0.1]])

    def __init__(self) -> None:
        uppers = np.append(self.EDGES[1:], 0.0)
        self._prior: Floats = np.exp((np.maximum(self.EDGES, uppers - 1) + uppers) / 2)
        self._verified: Floats = np.zeros(len(self.EDGES))
        self._accepted: Floats = np.zeros(len(self.EDGES))

    def forget(self) -> None:
        """Let earlier trees count a little less, once for each step with trees."""
        self._verified *= self.FORGETTING
        self._accepted *= self.FORGETTING

    def observe(self, tree: DraftTree, path: Seq[int]) -> None:
        """Count the nodes of a verified tree. path: its accepted nodes, the root first."""
        bins = self._bins(tree)
        np.add.at(self._verified, bins[1:], 1)
        np.add.at(self._accepted, bins[list(path[1:])], 1)

    def survival(self, tree: DraftTree) -> Floats:
        """Probability that each node of a tree is accepted, 1 for the root; at most that of its parent."""
        means = (self._accepted + self.PRIOR_NODES * self._prior) / (self._verified + self.PRIOR_NODES)
        survival: Floats = np.minimum.accumulate(means[::-1])[::-1][self._bins(tree)]  # no worse score is likelier
        survival[0] = 1.0
        for node in range(1, len(tree)):
            survival[node] = min(survival[node], survival[tree.parents[node]])
        return survival

    def _bins(self, tree: DraftTree) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.EDGES, np.array(tree.log_probs), side="right") - 1


class AdaptiveDraftBudget:
    """The size with the most tokens per second.

    Trees that lost time against plain decoding leave a debt, in seconds. Without trees the debt falls by RETRY_SHARE of the
    time. When it is paid and no size seems worth its cost, acceptance and the drafter's speed are estimated from the start
    again: so a drafter that has become better is found, and retries take at most that share of all time.

    Until the first MIN_TREES trees were verified, at most NUM_FIRST sequences get one: a guess must not cost all of a batch.
    """

    RETRY_SHARE = 0.03
    NUM_FIRST, MIN_TREES = 2, 8
    SPEED_RATE = 0.1  # weight of a step in tokens_per_s

    def __init__(self, max_nodes: int, verify: CostModel, draft: CostModel) -> None:
        """max_nodes: of any tree, the root included. verify: seconds by rows. draft: seconds to wait by number of trees."""
        self.num_nodes = 1
        self.tokens_per_s = 0.0
        self._max_nodes = max_nodes
        self._verify = verify
        self._draft_at_start = copy.copy(draft)
        self._draft = draft
        self._acceptance = AcceptanceModel(max_nodes)
        self._survival = SurvivalModel()
        self._sizes: dict[str, int] = {}
        self._drafter_is_current = False
        self._debt_s = 0.0
        self._num_seen = 0  # trees verified since the estimates began

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0) -> dict[str, int]:
        chosen = self._sized(decoding, most, num_plain)
        if decoding and self.num_nodes == 1 and self._debt_s == 0:
            self._draft, self._acceptance = copy.copy(self._draft_at_start), AcceptanceModel(self._max_nodes)
            self._num_seen = 0
            chosen = self._sized(decoding, most, num_plain)
        before, self._sizes = self._sizes, chosen
        # A drafter gets nothing of a sequence without trees, and has to catch up in its next round.
        self._drafter_is_current = all(before.get(name, size) > 1 for name, size in chosen.items() if size > 1)
        return chosen

    def _sized(self, decoding: Seq[str], most: int, num_plain: int) -> dict[str, int]:
        """The best size by the present estimates, of as many sequences as may have trees; 1 of the others."""
        num_first = len(decoding) if self._num_seen >= self.MIN_TREES else self.NUM_FIRST
        drafted = decoding[:num_first]
        if drafted:
            self.num_nodes = self._best_size(len(drafted), num_plain + len(decoding) - len(drafted), most)
        return dict.fromkeys(decoding, 1) | dict.fromkeys(drafted, self.num_nodes)

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        if not trees:
            return []
        survivals = [self._survival.survival(tree) for tree in trees]
        nodes = np.concatenate([survival[1:] for survival in survivals])
        order = np.argsort(-nodes, kind="stable")  # ties go to the earlier node, hence parents before their children
        num_rows = num_plain + len(trees)
        seconds = self._verify.at(num_rows + np.arange(len(nodes) + 1)) + float(self._draft.at(len(trees)))
        num_kept = int(np.argmin(seconds / (num_rows + np.cumsum(np.append(0.0, nodes[order])))))
        is_kept = np.zeros(len(nodes), np.bool_)
        is_kept[order[:num_kept]] = True
        parts = np.split(is_kept, np.cumsum([tree.num_drafted for tree in trees])[:-1])
        return [
            tree if part.all() else tree.pruned([0, *(np.flatnonzero(part) + 1).tolist()])
            for tree, part in zip(trees, parts, strict=True)
        ]

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], wait_s: float, verify_s: float) -> None:
        if not batch:
            return
        num_rows = sum(len(scheduled.slots) for scheduled in batch)
        num_requested = sum(size > 1 for size in self._sizes.values())
        decode_only = all(scheduled.tree is not None for scheduled in batch)
        if decode_only:
            self._verify.observe(num_rows, verify_s)
        if num_requested and self._drafter_is_current:
            self._draft.observe(num_requested, wait_s)
        if num_requested:
            self._acceptance.forget()
            self._survival.forget()
        num_of_drafted = 0
        for scheduled, output in zip(batch, outputs, strict=True):
            size = self._sizes.get(scheduled.sequence.request.id, 1)
            if scheduled.tree is not None and output.accepted is not None and size > 1:
                self._acceptance.observe(size, scheduled.tree, output.accepted.path)
                self._survival.observe(scheduled.tree, output.accepted.path)
                self._num_seen += 1
                num_of_drafted += len(output.accepted.tokens)
        if not num_requested:
            self._debt_s = max(self._debt_s - self.RETRY_SHARE * (wait_s + verify_s), 0.0)
        elif decode_only:
            num_tokens = sum(len(output.accepted.tokens) for output in outputs if output.accepted)
            speed = num_of_drafted / max(wait_s + verify_s, 1e-9) / num_requested
            self.tokens_per_s += self.SPEED_RATE * (speed - self.tokens_per_s) if self.tokens_per_s else speed
            plain_s = float(self._verify.at(len(batch))) * num_tokens / len(batch)
            self._debt_s = max(self._debt_s + wait_s + verify_s - plain_s, 0.0)

    def _best_size(self, num_decoding: int, num_plain: int, most: int) -> int:
        seconds = self._verify.at(num_plain + num_decoding * self._acceptance.rows(most))
        seconds[1:] += self._draft.at(num_decoding)
        return 1 + int(np.argmin(seconds / (num_plain + num_decoding * self._acceptance.tokens(most))))
