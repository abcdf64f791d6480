"""How large the draft trees of the next step may be. No output depends on it.

`AdaptiveDraftBudget` takes the size with the most tokens per second. Let B sequences have trees of up to k nodes and d
levels, let P have none, and let the m likeliest of all drafted nodes be verified. Such a step takes verify(P + B + m) +
draft(B, k, d) seconds and yields P + B + a(m, k, d) tokens. verify and draft are tables of seconds, measured at start and
refined by every step. Contexts take seconds too, but no node adds to these. a is the expected number of accepted nodes. It
comes from the trees drafted last, and from how likely a node with its score is accepted, which is learned from what was
verified.

Once the trees are there, their nodes compete by their own scores for the same seconds.

An estimate may be wrong, so a credit bounds what trees lose against plain decoding, see `Credit`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from eyas.config import TreeConfig
from eyas.engine.draft_costs import (
    DECODE_ONLY,
    NO_TREE,
    CostModel,
    DraftCosts,
    NextStep,
    RecentTrees,
    StepTimes,
    SurvivalModel,
    TreeSize,
)
from eyas.engine.sequence import ScheduledSequence
from eyas.protocol.tree import DraftTree, cut_trees
from eyas.sampling.acceptance import VerifyOutput

log = logging.getLogger(__name__)


class Credit:
    """What trees may still lose against plain decoding.

    Gains of trees raise it and losses lower it. Once it is used up there are no trees, and it grows by a share of the time
    until trees may lose `RESTART` plain steps again. So trees lose little more than that share of the time.
    """

    SHARE = 0.01  # of the time without trees
    FIRST, RESTART, MOST = 4.0, 1.0, 12.0  # plain steps that trees may lose: at first, after a stop, and after gains
    COLD_ROUNDS = 6  # of a drafter elsewhere that lose a plain step at most: it loads, connects, and gets the prompts

    def __init__(self, is_apart: bool = False) -> None:
        """is_apart: whether the drafter works elsewhere."""
        self._steps, self._num_cold = self.FIRST, self.COLD_ROUNDS if is_apart else 0
        self.is_stopped = False

    def earn(self, steps: float) -> None:
        """Add a share of a time without trees, in plain steps."""
        self._steps = max(self._steps, min(self._steps + self.SHARE * steps, self.RESTART))
        self.is_stopped = self.is_stopped and self._steps < self.RESTART

    def add(self, gain: float, pays: bool) -> None:
        """Add what the trees of a step have gained, in plain steps. pays: whether trees may be expected to gain."""
        gain, self._num_cold = max(gain, -1.0) if self._num_cold else gain, max(self._num_cold - 1, 0)
        self._steps = min(self._steps + gain, self.MOST if pays else self.RESTART)
        self.is_stopped = self._steps <= 0

    def renew(self) -> None:
        """Let trees try again."""
        self._steps, self.is_stopped = max(self._steps, self.RESTART), False


class Plan(NamedTuple):
    """A choice of AdaptiveDraftBudget.

    rate: tokens per second with the best size, or without trees if that is more. gain: with it, over plain decoding.
    pauses: whether there are no trees only because prompts fill the step.
    known_size: most nodes it could have. made_at: steps with trees before it. num_rows: of the step without
    trees and prompts. all_rows: without trees.
    """

    size: TreeSize = NO_TREE
    rate: float = 0.0
    gain: float = 0.0
    pauses: bool = False
    known_size: int = 0
    made_at: int = 0
    num_rows: int = 1
    all_rows: int = 1


class AdaptiveDraftBudget:
    """The size with the most tokens per second, for all sequences; without trees worth their cost a few sequences try some.

    Scouts, a few sequences, have the largest trees while no size seems to pay, and else in a step now and then: the
    largest trees show which parts of them would pay. They are as many as are drafted in about the time of one.
    """

    MARGIN, FIRST_MARGIN = 1.01, 1.04  # what a size must yield over plain decoding, to go on and to begin
    AS_GOOD = 0.99  # of the best rate: the deepest of such sizes is chosen, as its trees say the most
    PLAN_STEPS = 16  # with trees that a choice holds for, unless the rows are others; without, each may change it
    SCOUT_STEPS, CAPPED_STEPS = 32, 4  # from scouts to scouts: usually, and while no tree was as large as it may be now
    MAX_SCOUTS, SCOUT_COST = 8, 1.2  # the last: of a round for scouts, relative to one for one sequence
    SCOUT_ROWS = 0.5  # of a plain step: what the rows of scouts' nodes may cost that do not seem to pay
    RATE = 0.1  # weight of a step in tokens_per_s, and in the time between steps
    MAX_CATCH_UP = 10.0  # seconds of a round with sequences to catch up with, relative to others: more is no cost of trees
    HIDDEN_SHARE = 0.2  # of the wait in the time that it hid: with less, trees had probably come before
    MAX_LATE = 0.25  # share of sequences that the drafter has to catch up with, in rounds whose time is no outlier
    OBSERVE_STEPS = 4  # without trees, from one whose times are learned from to the next: they are many
    CUT_STEP = 6  # nodes of recent trees from one number of verified nodes that is considered to the next

    def __init__(
        self,
        tree: TreeConfig,
        verify: CostModel,
        draft: DraftCosts,
        is_apart: bool = False,
        context_token_s: float = 0.0,
    ) -> None:
        """tree: the largest one. verify: seconds by rows, without those of contexts. is_apart: whether the drafter also
        works between two steps. context_token_s: seconds for each cached token that rows attend to."""
        self.num_nodes, self.tokens_per_s = 1, 0.0
        self._tree, self._verify, self._draft = tree, verify, draft
        self._is_apart, self._context_token_s = is_apart, context_token_s
        self._survival, self._recent, self._credit = SurvivalModel(), RecentTrees(), Credit(is_apart)
        self._sizes: dict[str, TreeSize] = {}
        self._step, self._most = DECODE_ONLY, 1
        self._plan = Plan()
        self._plans: dict[bool, Plan] = {}  # the last ones, for steps with prompts and without
        self._scouts: tuple[str, ...] = ()
        self._num_steps = self._num_drafted = self._num_scouts = self._num_others = 0
        self._others_s = (0.0, 0.0)  # between and host of a step
        self._is_timed, self._prunes, self._num_accounted = False, True, 1
        self._drafted: dict[int, tuple[DraftTree, DraftTree]] = {}  # by id, what is left of trees that came, and the trees

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY) -> dict[str, TreeSize]:
        most = min(most, self._tree.num_draft_tokens)
        self._step, self._most = step, most
        chosen = self._chosen(decoding, most, num_plain) if decoding and most > 1 else {}
        late = [name for name in chosen if not self._sizes.get(name, NO_TREE).depth]
        self._is_timed = len(late) <= self.MAX_LATE * len(chosen)
        self._sizes = dict.fromkeys(decoding, NO_TREE) | chosen
        self.num_nodes = max((size.nodes for size in chosen.values()), default=1)
        return self._sizes

    @property
    def takes_prompts(self) -> bool:
        return not self._credit.is_stopped

    def _chosen(self, decoding: Seq[str], most: int, num_plain: int) -> dict[str, TreeSize]:
        """Sizes of the sequences that draft."""
        before, self._scouts = tuple(name for name in self._scouts if name in decoding), ()
        is_stopped = self._credit.is_stopped
        if is_stopped and before and not self._is_timed:  # only the next round shows what one without catching up takes
            self._scouts = before
            return dict.fromkeys(before, self._full(most))
        if is_stopped and 2 / 3 < len(decoding) / self._num_accounted < 1.5:
            return {}
        plan, full = self._planned(len(decoding), most, num_plain), self._full(most)
        self._plan = plan
        if is_stopped and plan.size.depth:  # what other numbers of sequences lost says little of these
            self._credit.renew()
        elif is_stopped or plan.pauses:
            return {}
        self._num_drafted += 1
        chosen = dict.fromkeys(decoding, plan.size) if plan.size.depth else {}
        interval = self.CAPPED_STEPS if plan.size.nodes == plan.known_size < most else self.SCOUT_STEPS
        if not chosen or (plan.size != full and self._num_drafted % interval == 0):
            self._scouts = before or self._next_scouts(decoding, full)
        return chosen | dict.fromkeys(self._scouts, full)

    def _full(self, most: int) -> TreeSize:
        return TreeSize(most, min(self._tree.num_steps, most - 1))

    def _next_scouts(self, decoding: Seq[str], full: TreeSize) -> tuple[str, ...]:
        """Some sequences, other ones each time."""
        most_s, count = self.SCOUT_COST * self._draft.at(1, full), 1
        while count < min(self.MAX_SCOUTS, len(decoding)) and self._draft.at(count + 1, full) <= most_s:
            count += 1
        first = self._num_scouts % len(decoding)
        self._num_scouts += count
        return tuple([*decoding[first:], *decoding[:first]][:count])

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        parts = self._pruned(trees, num_plain) if trees else []
        self._drafted = {id(part): (part, tree) for part, tree in zip(parts, trees, strict=True)}
        return parts

    def _pruned(self, trees: Seq[DraftTree], num_plain: int) -> list[DraftTree]:
        """The likeliest nodes of all trees that yield more tokens than their seconds would otherwise."""
        chances = np.concatenate([survival[1:] for survival in self._survival.survival(trees)])
        order = np.argsort(-chances, kind="stable")  # ties go to the earlier node, hence parents before their children
        num_rows = num_plain + len(trees)
        seconds = self._verify.at(self._step.num_prompt_rows + num_rows + np.arange(len(chances) + 1))
        rate = max(self._plan.rate, num_rows / self._step_s(num_rows))
        num_kept = int(np.argmax(np.append(0.0, np.cumsum(chances[order])) - rate * seconds))
        if not self._plan.size.depth:  # nodes that are always left out would never show that they are accepted
            most_s = seconds[0] + self.SCOUT_ROWS * self._step_s(num_rows)
            num_kept = max(num_kept, int(np.searchsorted(seconds, most_s, side="right")) - 1)
        is_kept = np.zeros(len(chances), np.bool_)
        is_kept[order[:num_kept]] = True
        return cut_trees(trees, is_kept)

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], times: StepTimes) -> None:
        if not batch:
            return
        wait_s, verify_s, between_s, host_s = times
        requested = [size for size in self._sizes.values() if size.depth] if self.num_nodes > 1 else []
        self._num_steps += 1
        if not requested:
            self._credit.earn(1.0)
            if self._num_others > DraftCosts.NUM_FIRST and self._num_steps % self.OBSERVE_STEPS:
                return
        draft_s = self._draft.at(len(requested), max(requested)) if requested else 0.0
        if between_s is not None:
            wait_s = self._with_hidden(wait_s, between_s, draft_s) if self._is_apart and self._num_others else wait_s
            self._observe_others(between_s, host_s)
        decode_only = all(scheduled.tree is not None for scheduled in batch)
        if decode_only:
            num_rows = sum([len(scheduled.slots) for scheduled in batch])
            context_s = self._context_token_s * sum([scheduled.first for scheduled in batch])
            rows_s = self._verify.seconds(num_rows)
            self._verify.observe(num_rows, verify_s * rows_s / (rows_s + context_s))
        if not requested:
            return
        if self._is_timed and min(requested) == max(requested):
            self._draft.observe(len(requested), max(requested), wait_s)
        num_drafted = self._observe_trees(batch, outputs)
        if decode_only:
            speed = num_drafted / max(wait_s + verify_s + sum(self._others_s), 1e-9) / len(requested)
            self.tokens_per_s += self.RATE * (speed - self.tokens_per_s) if self.tokens_per_s else speed
        if not self._is_apart:  # a longer round here shows a pause of the machine, and elsewhere what a round costs
            wait_s = min(wait_s, (CostModel.MAX_SURPRISE if self._is_timed else self.MAX_CATCH_UP) * draft_s or wait_s)
        self._account(batch, outputs, wait_s)

    def _observe_others(self, between_s: float, host_s: float) -> None:
        """Of the first times the least counts, as a longer one may hide a draft; then a mean."""
        self._num_others += 1
        most, rate = CostModel.MAX_SURPRISE, 0.0 if self._num_others <= DraftCosts.NUM_FIRST else self.RATE
        between, host = (
            known + rate * (min(own, most * known or own) - known) if rate else min(own, known or own)
            for known, own in zip(self._others_s, (between_s, host_s), strict=True)
        )
        self._others_s = between, host

    def _with_hidden(self, wait_s: float, between_s: float, draft_s: float) -> float:
        """The wait for a drafter apart after a usual time between the steps: a longer one hid a part of its work.

        draft_s: what the draft is expected to take, 0 if unknown.
        """
        hidden_s = max(between_s - self._others_s[0], 0.0)
        if draft_s and wait_s < self.HIDDEN_SHARE * hidden_s:  # the trees were there, perhaps for long
            return min(wait_s + hidden_s, max(draft_s, wait_s))
        return wait_s + hidden_s

    def _account(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], wait_s: float) -> None:
        """Add what the trees of a step have gained to the credit.

        A token is worth what it takes in a plain step of as many sequences, and rows cost what they add to the pass.
        """
        pairs = zip(batch, outputs, strict=True)
        done = [(len(s.slots), len(o.accepted.tokens)) for s, o in pairs if s.tree is not None and o.accepted]
        if not done:
            return
        num_rows, num_drafted = sum([len(s.slots) for s in batch]), sum([rows - 1 for rows, _ in done])
        plain_s = self._step_s(len(done))
        gain_s = plain_s * (sum([tokens for _, tokens in done]) / len(done) - 1) - wait_s
        gain_s -= self._verify.seconds(num_rows) - self._verify.seconds(num_rows - num_drafted)
        self._credit.add(gain_s / plain_s, self._plan.size.depth > 0 or not self._plan.known_size)
        self._num_accounted = len(done)

    def _step_s(self, num_rows: float) -> float:
        """Expected seconds of a step, without its draft."""
        return self._verify.seconds(num_rows) + self._fixed_s

    @property
    def _fixed_s(self) -> float:
        """Expected seconds of a step that do not depend on its rows, without its draft."""
        return sum(self._others_s) + self._context_token_s * self._step.num_context_tokens

    def _planned(self, num_drafting: int, most: int, num_plain: int) -> Plan:
        """The best size by the present estimates, at most PLAN_STEPS old."""
        step, has_prompts = self._step, self._step.num_prompt_rows > 0
        num_rows, all_rows = num_drafting + num_plain + step.num_prefilling, num_drafting + num_plain + step.num_prompt_rows
        plan, known_size = self._plans.get(has_prompts), min(self._recent.known_size, most)
        if plan and self._is_fresh(plan, known_size, num_rows, all_rows):
            return plan
        found = self._best(num_rows - num_plain, num_rows, all_rows, known_size)
        found = found._replace(known_size=known_size, made_at=self._num_drafted, num_rows=num_rows, all_rows=all_rows)
        if bool(found.size.depth) != bool(plan and plan.size.depth):
            what = f"trees of {found.size.nodes} nodes" if found.size.depth else "no trees"
            log.info("%d sequences draft %s: %.2f of plain", num_drafting, what, found.gain, extra={"rate_limited": True})
        self._plans[has_prompts] = found
        return found

    def _is_fresh(self, plan: Plan, known_size: int, num_rows: int, all_rows: int) -> bool:
        """Return whether a plan still holds, for about as many sequences and rows."""
        most = 1.1 if plan.size.depth else 2.0  # prompts differ in length
        is_same = 0.9 < plan.num_rows / num_rows < 1.1 and 1 / most < plan.all_rows / all_rows < most
        return (
            is_same
            and plan.known_size == known_size
            and self._num_drafted - plan.made_at < (self.PLAN_STEPS if plan.size.depth else 1)
        )

    def _best(self, count: int, num_rows: int, all_rows: int, known_size: int) -> Plan:
        """The size with the most tokens per second for `count` of num_rows sequences, none without a gain.

        Prompts fill a pass, and are of use themselves. So beside them a second is worth what it is in other steps.
        """
        plain_rate = num_rows / self._step_s(num_rows)
        if known_size < 2:
            return Plan(rate=plain_rate)
        chances, weights, depths, places = self._recent.nodes(self._survival, known_size)
        if not len(chances):  # the drafter found nothing
            return Plan(rate=plain_rate)
        # the deepest first
        sizes = [TreeSize(n, depth) for depth in _steps(1, self._tree.num_steps) for n in _steps(2, known_size) if depth < n]
        nodes, levels = np.array(sizes).T[:, :, None]
        shares = weights * ((places < nodes) & (depths <= levels))  # [sizes, nodes]
        some = slice((len(chances) - 1) % self.CUT_STEP, None, self.CUT_STEP) if self._prunes else slice(-1, None)
        # of one tree, when nodes are verified up to each of these, from the likeliest on
        rows, accepted = np.cumsum(shares, 1)[:, some], np.cumsum(shares * chances, 1)[:, some]
        draft_s = np.array([[self._draft.at(count, size)] for size in sizes])
        rates = (num_rows + count * accepted) / (self._verify.at(num_rows + count * rows) + draft_s + self._fixed_s)
        best_rate = float(rates.max())
        least_rate = plain_rate * (self.MARGIN if self._plan.size.depth else self.FIRST_MARGIN)
        if best_rate < least_rate:
            return Plan(rate=plain_rate, gain=best_rate / plain_rate)
        first = int(np.argmax(rates.max(axis=1) >= max(self.AS_GOOD * best_rate, least_rate)))
        size = sizes[first]
        if all_rows > num_rows:
            more_s = self._verify.at(all_rows + count * rows) - self._verify.seconds(all_rows) + draft_s
            gains = count * accepted - best_rate * more_s
            size = sizes[int(np.argmax(gains.max(axis=1)))] if gains.max() > 0 else NO_TREE
        return Plan(size, best_rate, best_rate / plain_rate, pauses=not size.depth)

    def _observe_trees(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput]) -> int:
        """Learn from the trees of a step. Returns the tokens that their sequences have got."""
        trees, paths, num_tokens = list[DraftTree](), list[tuple[int, ...]](), 0
        full, drafted, self._drafted = self._full(self._most), self._drafted, {}
        for scheduled, output in zip(batch, outputs, strict=True):
            tree, request = scheduled.tree, scheduled.sequence.request
            size = self._sizes.get(request.id, NO_TREE)
            if tree is None or output.accepted is None or not size.depth:
                continue
            trees.append(tree)
            paths.append(output.accepted.path)
            num_tokens += len(output.accepted.tokens)
            _, whole = drafted.get(id(tree), (tree, tree if tree.sampled or not drafted else None))
            most_levels = len(scheduled.sequence.slots) - scheduled.first - 2  # as the last of the tokens is no drafted one
            if size == full and whole and most_levels >= full.depth:
                self._recent.observe(whole, min(request.num_draft_tokens or self._most, self._most))
        self._prunes = bool(drafted) or not any(tree.num_drafted for tree in trees)
        self._survival.forget()
        self._survival.observe(trees, paths)
        return num_tokens


def _steps(first: int, last: int) -> list[int]:
    """Sizes worth a comparison from the largest down: all small ones, then two for each doubling."""
    return sorted({last, *(n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64) if first <= n < last)}, reverse=True)
