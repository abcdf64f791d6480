"""Sizes of the draft trees of the next step. No output depends on it.

Let B sequences have trees of up to k nodes and d levels, let P have none, and let the m likeliest of all drafted nodes be
verified. Such a step takes verify(P + B + m) + draft(B, k, d) + other seconds, and yields P + B + a(m, k, d) tokens. Seconds
are timed at start and follow what steps take. a is the expected number of accepted nodes, by the trees drafted last and by
how likely nodes with their scores were accepted lately.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from eyas.config import TreeConfig
from eyas.engine.budget.account import GainAccount
from eyas.engine.budget.base import DECODE_ONLY, NextStep, StepTimes
from eyas.engine.budget.costs import CostModel, DraftCosts, HostCosts, RecentTrees, SurvivalModel
from eyas.engine.sequence import ScheduledSequence
from eyas.protocol.commit import NO_TREE, TreeBudget
from eyas.protocol.tree import DraftTree, DraftTrees
from eyas.sampling.acceptance import StepOutputs

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A size, or none, with what is expected of a step.

    Attributes:
        rate: tokens per second.
        gain: of the best size, over plain decoding.
        seconds, plain_s: with trees and without.
    """

    size: TreeBudget = NO_TREE
    rate: float = 0.0
    gain: float = 0.0
    seconds: float = 0.0
    plain_s: float = 0.0


class CatchingUp:
    """Chooses whom a drafter catches up with, by the seconds that it takes.

    Attributes:
        seconds: by sequence; empty if the drafter lacks nothing of any.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._saved_s = 0.0  # by steps that had no use for it

    def ready(self, decoding: Seq[str], plain_s: float) -> Seq[str]:
        """Return the sequences that draft while trees pay: those that lack nothing, and in turn the others.

        Catching up with them takes a plain step's time in each step on average: one that takes longer waits until enough
        steps have saved for it, and the ones after it wait too.
        """
        if not self.seconds:
            return decoding
        found, is_next = list[str](), True
        self._saved_s = min(self._saved_s + plain_s, max(plain_s, *self.seconds.values()))
        for name in decoding:
            late_s = self.seconds[name]
            is_next = is_next and late_s <= self._saved_s
            if not late_s or is_next:
                found.append(name)
                self._saved_s -= late_s
        if not found:
            found.append(decoding[0])
            self._saved_s -= self.seconds[decoding[0]]
        return found

    def quick(self, decoding: Seq[str], most_s: float) -> Seq[str]:
        """Return the first sequences that the drafter catches up with in `most_s` together; at least the quickest one."""
        if not self.seconds:
            return decoding
        found = list[str]()
        for name in decoding:
            if self.seconds[name] <= most_s:
                found.append(name)
                most_s -= self.seconds[name]
        return found or [min(decoding, key=self.seconds.__getitem__)]


class AdaptiveDraftBudget:
    """The size with the most expected tokens per second, or none if no size yields MARGIN times as many as plain decoding.

    While there is none, a few sequences try the largest trees, when a GainAccount says so: it stops trees that lose time,
    too. Catching up with what the drafter lacks counts there; while trees pay, a plain step's time goes to it in each step.
    Nodes of trees that came compete by their own scores.

    Args:
        tree: the largest one.
        verify: seconds by rows, without those of contexts.
        is_apart: whether the drafter works elsewhere.
        context_token_s: seconds for each cached token that rows attend to.
        name: of its trees, for the log.

    Attributes:
        bar: what steps without these trees yield, over plain decoding: above 1 if others draft in them.
    """

    lookups_alone = False
    MARGIN, AS_GOOD = 1.05, 0.99  # the latter: of the best rate; the deepest of such sizes says the most
    CHOICE_STEPS = 8  # that a choice holds for, unless the rows change
    MAX_TREES, TRY_DRAFT, TRY_ROWS = 8, 0.5, 0.25  # of a try: its trees, and plain steps of its draft and rows
    EXPLORE_STEPS = 8  # from some of the largest trees to the next
    MAX_LATE = 0.25  # share of sequences that the drafter catches up with, in steps whose wait is learned from
    NUM_FIRST, PLAIN_STEPS = 6, 4  # steps to learn from: the first ones, and every fourth without trees

    def __init__(
        self,
        tree: TreeConfig,
        verify: CostModel,
        draft: DraftCosts,
        is_apart: bool = False,
        context_token_s: float = 0.0,
        name: str = "drafts",
    ) -> None:
        self.num_nodes = 1
        self.bar = 1.0
        self._name = name
        self._tree, self._verify, self._draft, self._is_apart = tree, verify, draft, is_apart
        self._survival, self._recent, self._choice = SurvivalModel(), RecentTrees(), Choice()
        self._context_token_s, self._host = context_token_s, HostCosts()
        self._step, self._most, self._sizes = DECODE_ONLY, 1, dict[str, TreeBudget]()
        self._full = NO_TREE  # the largest size
        self._num_steps = self._num_drafted = self._age = 0
        self._rows = (0, 0)  # of the last choice
        self._account, self._catching_up = GainAccount(is_apart), CatchingUp()
        self._num_others = 0  # sequences that cannot draft yet
        self._is_usual = self._prunes = True
        self._late_s = 0.0  # seconds to catch up with the sequences that draft in the next step
        self._trying: list[str] = []
        self._drafted: dict[int, DraftTree] = {}  # whole trees, by id of what is left of them

    @property
    def is_on(self) -> bool:
        """Return whether steps have trees, not only tries."""
        return self._account.is_on

    @property
    def takes_prompts(self) -> bool:
        return self._account.is_on

    @property
    def gain(self) -> float:
        """Return the tokens per second over those of plain decoding, as expected; 1 while there are no trees."""
        return max(self._choice.gain, 1.0) if self._account.is_on else 1.0

    def compare_with(self, bar: float) -> None:
        """Set `bar`. What trees have gained over plain decoding pays for no losses against other trees."""
        if self.bar == 1.0 and bar > 1.0:
            self._account.forget()
        self.bar = bar

    def choose(
        self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY
    ) -> dict[str, TreeBudget]:
        self._step, self._most, before = step, min(most, self._tree.num_draft_tokens), self._sizes
        self._full = TreeBudget(self._most, min(self._tree.num_steps, self._most - 1))
        self._num_others = num_plain + step.num_prefilling
        sizes = self._chosen(decoding, num_plain) if decoding and self._most > 1 else {}
        self._late_s = sum([self._catching_up.seconds.get(name, 0.0) for name, size in sizes.items() if size.max_depth])
        self._is_usual = sum([not before.get(name, NO_TREE).max_depth for name in sizes]) <= self.MAX_LATE * len(sizes)
        self._sizes = dict.fromkeys(decoding, NO_TREE) | sizes
        self.num_nodes = max((size.max_nodes for size in sizes.values()), default=1)
        return self._sizes

    def _chosen(self, decoding: Seq[str], num_plain: int) -> dict[str, TreeBudget]:
        """Return the sizes of the sequences that draft."""
        count = len(decoding)
        if not self._account.begin_step(count + self._num_others):
            return {}
        usual = self._tree.num_steps + 1  # tokens of a step with a tree, at most
        late = [max(missing - usual, 0) * self._draft.token_s for missing in self._step.missing]
        self._catching_up.seconds = dict(zip(decoding, late, strict=True)) if any(late) else {}
        choice = self._choice = self._best(count, num_plain)
        if not self._account.is_on and choice.size.max_depth:
            self._start(count)
        elif self._account.is_on and not choice.size.max_depth and not self._step.num_prompt_rows:
            self._stop(count)
        if self._account.pause:
            return {}
        sizes = dict[str, TreeBudget]()
        if choice.size.max_depth:
            sizes = dict.fromkeys(self._catching_up.ready(decoding, choice.plain_s), choice.size)
        if not self._account.is_on or (sizes and choice.size != self._full and self._num_drafted % self.EXPLORE_STEPS == 0):
            sizes |= dict.fromkeys(self._few(list(sizes) or decoding), self._full)
        return sizes

    def _best(self, count: int, num_plain: int) -> Choice:
        """Return the size with the most tokens per second for `count` sequences, none without a gain.

        Prompts fill a pass, and are of use themselves. So beside them a second is worth what it is in other steps.
        """
        step, known = self._step, min(self._recent.known_size, self._most)
        num_rows, all_rows = count + num_plain + step.num_prefilling, count + num_plain + step.num_prompt_rows
        self._age += 1
        if self._account.is_on and (num_rows, all_rows) == self._rows and self._age < self.CHOICE_STEPS:
            return self._choice
        self._rows, self._age = (num_rows, all_rows), 0
        plain_s = self._step_s(num_rows)
        plain = Choice(rate=self.bar * num_rows / plain_s, plain_s=plain_s)
        sizes = [TreeBudget(n, d) for d in _steps(1, self._tree.num_steps) for n in _steps(2, known) if d < n]
        if not sizes or (yields := self._recent.yields(self._survival, known, sizes, self._prunes)) is None:
            return plain
        rows, accepted = count * yields[0], count * yields[1]  # [sizes, numbers of verified nodes]
        draft_s = self._draft.at(count, *np.array(sizes).T)[:, None] + self._host.more_s
        seconds = plain_s + self._verify.at(num_rows + rows) - self._verify.seconds(num_rows) + draft_s
        rates = (num_rows + accepted) / seconds
        best, least = float(rates.max()), plain.rate * (1.0 if self._account.is_on else self.MARGIN)
        place = int(np.argmax(rates.max(1) >= max(self.AS_GOOD * best, least)))  # the deepest come first
        found = Choice(sizes[place], best, best / plain.rate, float(seconds[place, rates[place].argmax()]), plain_s)
        if best < least:
            return found._replace(size=NO_TREE, rate=plain.rate)
        if all_rows > num_rows:
            more_s = self._verify.at(all_rows + rows) - self._verify.seconds(all_rows) + draft_s
            gains = (accepted - best * more_s).max(1)
            found = found._replace(size=sizes[int(gains.argmax())] if gains.max() > 0 else NO_TREE)
        return found

    def _few(self, decoding: Seq[str]) -> list[str]:
        """Return a few sequences, other ones each time; the same again if the drafter has just caught up with them."""
        if self._is_usual or not set(self._trying) <= set(decoding) or not self._trying:
            first, count, most_s = self._num_drafted % len(decoding), 1, self.TRY_DRAFT * self._choice.plain_s
            while count < min(self.MAX_TREES, len(decoding)) and self._draft.at(count + 1, *self._full) <= most_s:
                count += 1
            others = [*decoding[first:], *decoding[:first]]
            most_s -= float(self._draft.at(count, *self._full))
            self._trying = list(self._catching_up.quick(others, most_s)[:count])
        return self._trying

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        self._drafted = {id(tree): tree for tree in trees}
        if not trees:
            return []
        # keep the likeliest nodes of all trees that yield more tokens than their seconds would otherwise
        chances = np.concatenate([survival[1:] for survival in self._survival.survival(trees)])
        order = np.argsort(-chances, kind="stable")  # ties go to the earlier node, hence parents before their children
        num_rows = num_plain + len(trees)
        seconds = self._verify.at(self._step.num_prompt_rows + num_rows + np.arange(len(chances) + 1))
        rate = max(self._choice.rate, num_rows / self._step_s(num_rows))
        num_kept = int(np.argmax(np.append(0.0, np.cumsum(chances[order])) - rate * seconds))
        if not self._account.is_on:  # nodes that are always left out would never show that they are accepted
            most_s = seconds[0] + self.TRY_ROWS * self._step_s(num_rows)
            num_kept = max(num_kept, int(np.searchsorted(seconds, most_s, side="right")) - 1)
        if num_kept == len(order):
            return list(trees)
        whole = DraftTrees.of(trees)
        is_kept = np.zeros(len(whole.tokens), np.bool_)
        is_kept[whole.firsts] = True
        drafted = np.flatnonzero(~is_kept)
        is_kept[drafted[order[:num_kept]]] = True
        parts = list(whole.cut(is_kept))
        self._drafted = {id(part): tree for part, tree in zip(parts, trees, strict=True)}
        return parts

    def observe(self, batch: Seq[ScheduledSequence], outputs: StepOutputs, times: StepTimes) -> None:
        self._num_steps += 1
        requested = [size for size in self._sizes.values() if size.max_depth] if self.num_nodes > 1 else []
        if not requested:
            self._account.rest()
            if self._num_steps > self.NUM_FIRST and self._num_steps % self.PLAIN_STEPS:
                return
        # between two steps a drafter elsewhere works too, which would look like a cost of trees
        self._host.observe(bool(requested) and not self._is_apart, len(batch), times.other)
        num_rows = sum([len(scheduled.slots) for scheduled in batch])
        is_decoding = not [scheduled for scheduled in batch if scheduled.tree is None]
        if is_decoding:
            rows_s, context = self._verify.seconds(num_rows), sum([scheduled.first for scheduled in batch])
            self._verify.observe(num_rows, times.verify * rows_s / (rows_s + self._context_token_s * context))
        if not requested:
            return
        expected_s = float(self._draft.at(len(requested), *max(requested)))
        wait_s = max(times.wait - self._late_s, 0.0)
        if self._is_usual and not self._late_s and min(requested) == max(requested):
            self._draft.observe(len(requested), max(requested), wait_s)
        self._observe_trees(batch, outputs)
        most_s = expected_s or np.inf  # a longer wait shows a pause of the machine, or catches up with what drafts later
        most_s *= 1.0 if self._account.is_on and not self._is_usual else np.inf if self._is_apart else CostModel.MAX_SURPRISE
        self._count_gain(batch, outputs, min(wait_s, most_s))

    def _observe_trees(self, batch: Seq[ScheduledSequence], outputs: StepOutputs) -> None:
        """Learn from the nodes of a step's trees."""
        trees, paths = list[DraftTree](), list[list[int]]()
        drafted, self._drafted = self._drafted, {}
        nodes, ends = outputs.nodes.tolist(), outputs.ends.tolist()
        for scheduled, start, end in zip(batch, [0, *ends[:-1]], ends, strict=True):
            tree, request = scheduled.tree, scheduled.sequence.request
            size = self._sizes.get(request.id, NO_TREE)
            if tree is None or start == end or not size.max_depth:
                continue
            trees.append(tree)
            paths.append(nodes[start:end])
            whole = drafted.get(id(tree), tree if tree.sampled or not drafted else None)
            most_levels = len(scheduled.sequence.slots) - scheduled.first - 2  # as the last of the tokens is no drafted one
            if size == self._full and whole and most_levels >= size.max_depth:
                self._recent.observe(whole, min(request.num_draft_tokens or self._most, self._most))
        self._num_drafted += 1
        self._prunes = bool(drafted) or not [tree for tree in trees if tree.num_drafted]
        self._survival.observe(trees, paths)

    def _count_gain(self, batch: Seq[ScheduledSequence], outputs: StepOutputs, wait_s: float) -> None:
        """Add what a step's trees have gained to the account.

        A token is worth what it takes without these trees, and rows cost what they add to a pass without prompts.
        """
        pairs = zip(batch, np.diff(outputs.ends, prepend=0).tolist(), strict=True)
        done = [(len(scheduled.slots), length) for scheduled, length in pairs if scheduled.tree is not None and length]
        if not done:
            return
        count, plain_s, was_on = len(done), self._step_s(len(done)), self._account.is_on
        rows_s = self._verify.seconds(sum([rows for rows, _ in done])) - self._verify.seconds(count)
        seconds = plain_s + wait_s + rows_s + self._host.more_s
        gain = sum([tokens for _, tokens in done]) / count / self.bar - seconds / plain_s
        # a drafter elsewhere that had to catch up shows in the next step what others take
        is_judged, load = self._is_usual or not self._is_apart, len(self._sizes) + self._num_others
        self._account.add(gain, self._late_s / plain_s, count, load, is_judged)
        if was_on and not self._account.is_on:
            self._log_stop(count)

    def _start(self, count: int) -> None:
        self._account.start()
        self._trying = []
        self._log(count, f"on: they yield {self._choice.gain:.2f} of the tokens per second")

    def _stop(self, count: int) -> None:
        self._account.stop(len(self._sizes) + self._num_others)
        self._log_stop(count)

    def _log_stop(self, count: int) -> None:
        self._log(count, f"off; will try again in {self._account.pause} steps")

    def _log(self, count: int, what: str) -> None:
        """Log a change of mind."""
        message = f"{self._name} for %d sequences, whose steps would take %.1f ms instead of %.1f, are %s"
        seconds, plain_s = self._choice.seconds, self._choice.plain_s
        log.info(message, count, 1000 * seconds, 1000 * plain_s, what, extra={"rate_limited": True})

    def _step_s(self, num_rows: float) -> float:
        """Return the expected seconds of a step, without its draft."""
        context_s = self._context_token_s * self._step.num_context_tokens
        return self._verify.seconds(num_rows) + self._host.plain_s + context_s


def _steps(first: int, last: int) -> list[int]:
    """Return sizes worth a comparison from the largest down: all small ones, then two for each doubling."""
    return sorted({last, *(n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64) if first <= n < last)}, reverse=True)
