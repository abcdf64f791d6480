"""How large the draft trees of the next step may be. No output depends on it.

`AdaptiveDraftBudget` takes the size with the most tokens per second. Let B sequences have trees of up to k nodes and d
levels, let P have none, and let the m likeliest of all drafted nodes be verified. Such a step takes verify(P + B + m) +
draft(B, k, d) seconds and yields P + B + a(m, k, d) tokens. verify and draft are tables of seconds, measured at start and
refined by every step. Contexts take seconds too, but no node adds to these. a is the expected number of accepted nodes. It
comes from the trees drafted last, and from how likely a node with its score is accepted, which is learned from what was
verified.

When the next trees are there, the nodes of all sequences compete in the same way, by their own scores.

A step with rows of prompts is bound by compute, so nodes cost more there, while its prompts are of use too. It has the
trees whose tokens take less time than they would in steps without prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from eyas.config import TreeConfig
from eyas.engine.draft_costs import (
    DECODE_ONLY,
    NO_TREE,
    Candidate,
    CostModel,
    DraftCosts,
    NextStep,
    Plan,
    RecentTrees,
    StepTimes,
    SurvivalModel,
    TreeSize,
)
from eyas.engine.sequence import ScheduledSequence
from eyas.sampling.acceptance import VerifyOutput
from eyas.tree import DraftTree, cut_trees

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
log = logging.getLogger(__name__)


class AdaptiveDraftBudget:
    """The size with the most tokens per second, for all sequences.

    Scouts, a few sequences, have the largest trees in the first steps, and later as often as costs about SCOUT_SHARE of the
    time. They are as many as are drafted in about the time of one, and draft twice in a row if the drafter has to catch up.

    Trees that lost time against plain decoding leave a debt, in seconds. Without trees it falls by RETRY_SHARE of the time,
    and after trials that failed one after the other by less, FAILED_SHARE of it at least.
    A debt of several steps stops drafting until RESTART_DEBT of it, or a third after a trial, is paid, or until it seems to
    pay for another number of sequences. Then it may lose no more than that until it has gained: one bad text or slow
    stretch says little of the next.
    While no size is worth its cost, there is a trial whenever there is no debt: scouts have TRIAL_TREES in a row, unless
    these lose more than TRIAL_DEBT plain steps. At least PLAIN_STEPS follow. The first FREE_TRIALS leave none, unless they
    lose COLD_START_S or STOP_DEBT: a drafter apart may have to load and to catch up.
    """

    RETRY_SHARE, FAILED_SHARE, COLD_START_S = 0.01, 0.25, 1.0
    TRIAL_TREES, TRIAL_DEBT, FREE_TRIALS, PLAIN_STEPS = 8, 4.0, 3, 4
    MAX_SCOUTS, SCOUT_COST = 8, 1.2  # the last: of a round for scouts, relative to one for one sequence
    HIDDEN_SHARE = 0.2  # of the wait in the time that it hid: with less, trees had probably come before
    STOP_DEBT, RESTART_DEBT = 24.0, 2.0  # plain steps of one sequence after which drafting stops: usually, and once it has
    SCOUT_SHARE, SCOUT_INTERVALS = 0.01, (4, 64)  # the last: fewest and most drafting steps from one with scouts to the next
    # What a size must yield, relative to plain decoding: to go on, and to begin, as drafters have to catch up.
    MARGIN, FIRST_MARGIN = 1.02, 1.06
    AS_GOOD = 0.99  # of the best rate: the deepest of such sizes is chosen, as its trees say the most, and stays whole
    # Estimates from so few sequences are less certain: the largest trees stay unless others, or none, are better by more.
    FEW, AS_GOOD_OF_FEW, DOUBT = 4, 0.9, 0.02
    OBSERVE_STEPS = 4  # of few sequences, or without trees, from one that is learned from to the next: they are short
    PLAN_STEPS, MAX_PLAIN_STEPS = 12, 64  # that a choice of trees holds for, and of none, unless the sequences are others
    FEW_TREES = 8  # whose nodes compete with the seconds of other steps, not only among each other
    CUT_STEP = 6  # nodes of recent trees from one number of verified nodes that is considered to the next
    SPEED_RATE = 0.1  # weight of a step in tokens_per_s, and in the time between steps
    GOOD_ACCEPTANCE = 0.9  # of a node whose parent is accepted: scouts are sent if that would pay
    RELAXING = 0.99  # of what catching up seems to cost, for each step in which a sequence has no tree because of it
    MAX_NEW_SHARE, MAX_CATCH_UP = 0.25, 10.0  # see choose; seconds of a first tree, relative to those of others
    CATCH_UP_GAIN = 2.0  # what trees must save, relative to catching up for them: a slight gain may be none

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
        self._is_apart, self._context_token_s = is_apart, context_token_s
        self.num_nodes, self.tokens_per_s = 1, 0.0
        self._tree, self._verify, self._draft = tree, verify, draft
        self._survival, self._recent = SurvivalModel(), RecentTrees()
        self._sizes: dict[str, TreeSize] = {}
        self._is_behind, self._is_timed, self._prunes = False, False, True
        self._debt_s, self._is_stopped, self._debt_rows, self._stop_debt = 0.0, False, 1, self.STOP_DEBT
        self._free_s = max(self.COLD_START_S, self.STOP_DEBT * verify.seconds(1))
        self._scouts: tuple[str, ...] = ()
        self._num_scouts = self._num_drafted = self._num_steps = 0
        self._is_trial, self._num_trials, self._num_left = False, 0, 0  # the last: steps that scouts still have trees in
        self._retry_share = self.RETRY_SHARE
        self._catch_up_s = 0.0  # that this trial has waited for
        self._plan: Plan | None = None
        self._plans: dict[bool, Plan] = {}  # the last ones, for steps with prompts and without
        self._others_s: tuple[float, ...] = (0.0, 0.0)  # between and host of a step
        self._num_others = 0  # how often these were measured
        self._most = 1
        self._step = DECODE_ONLY
        self._begun: set[str] = set()  # requests that have had trees
        self._num_missed = 0  # tokens that the drafter gets in the next round of sequences that it did not draft for last
        self._catch_up = np.array([0.0, 0.0])  # seconds that such tokens took, and how many there were
        self._drafted: dict[int, tuple[DraftTree, DraftTree]] = {}  # by id, what is left of trees that came, and the trees

    def choose(self, decoding: Seq[str], most: int, num_plain: int = 0, step: NextStep = DECODE_ONLY) -> dict[str, TreeSize]:
        most = min(most, self._tree.num_draft_tokens)
        self._step = step
        chosen = self._chosen(decoding, most, num_plain) if decoding and most > 1 else {}
        before, self._sizes, self._most = self._sizes, dict.fromkeys(decoding, NO_TREE) | chosen, most
        self.num_nodes = max((size.nodes for size in chosen.values()), default=1)
        # A drafter gets nothing of a sequence without trees, and has to catch up in its next round. New ones bring prompts.
        late = [name for name in chosen if name not in before or not before[name].depth]
        num_new = sum(name not in before for name in late)
        self._is_behind = len(late) > num_new
        self._is_timed = not self._is_behind and num_new <= self.MAX_NEW_SHARE * len(chosen)
        self._num_missed = self._missed(late)
        self._begun = self._begun.intersection(decoding).union(chosen) if late else self._begun
        return self._sizes

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        parts = self._pruned(trees, num_plain)
        self._drafted = {id(part): (part, tree) for part, tree in zip(parts, trees, strict=True)}
        return parts

    def _pruned(self, trees: Seq[DraftTree], num_plain: int) -> list[DraftTree]:
        if not trees or (self._plan and not self._plan.cuts and not self._scouts):
            return list(trees)
        nodes = np.concatenate([survival[1:] for survival in self._survival.survival(trees)])
        order = np.argsort(-nodes, kind="stable")  # ties go to the earlier node, hence parents before their children
        num_rows, size = num_plain + len(trees), max(self._sizes.values(), default=NO_TREE)
        fixed_s = self._draft.at(len(trees), size) + self._fixed_s
        seconds = self._verify.at(self._step.num_prompt_rows + num_rows + np.arange(len(nodes) + 1)) + fixed_s
        gained = num_rows + np.cumsum(np.append(0.0, nodes[order]))
        if self._step.num_prompt_rows and self._plan:
            num_kept = int(np.argmax(gained - self._plan.rate * seconds))
        elif self.tokens_per_s and len(trees) == num_rows <= self.FEW_TREES:  # need not make up for others at once
            num_kept = int(np.argmax(gained - num_rows * self.tokens_per_s * seconds))
        else:
            num_kept = int(np.argmax(gained / seconds))
        is_kept = np.zeros(len(nodes), np.bool_)
        is_kept[order[:num_kept]] = True
        if self._scouts:  # a whole tree shows whether what is left out would be accepted
            largest = max(range(len(trees)), key=lambda number: trees[number].num_drafted)
            first = sum(tree.num_drafted for tree in trees[:largest])
            is_kept[first : first + trees[largest].num_drafted] = True
        return cut_trees(trees, is_kept)

    def observe(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], times: StepTimes) -> None:
        if not batch:
            return
        wait_s, verify_s, between_s, host_s = times
        requested = [size for size in self._sizes.values() if size.depth]
        draft_s = self._draft.at(len(requested), max(requested)) if requested else 0.0
        if between_s is not None:
            wait_s = self._with_hidden(wait_s, between_s, draft_s) if self._is_apart and self._num_others else wait_s
            self._observe_others(between_s, host_s)
        self._num_steps += 1
        is_settled = self._is_settled(len(batch)) if requested else True
        learns = bool(not is_settled or self._scouts or self._num_steps % self.OBSERVE_STEPS == 0)
        decode_only = bool(requested or learns) and all(scheduled.tree is not None for scheduled in batch)
        if decode_only and learns:
            num_rows = sum([len(scheduled.slots) for scheduled in batch])
            context_s = self._context_token_s * sum([scheduled.first for scheduled in batch])
            rows_s = self._verify.seconds(num_rows)
            self._verify.observe(num_rows, verify_s * rows_s / (rows_s + context_s))
        if not requested:
            self._pay(self._retry_share * (wait_s + verify_s + sum(self._others_s)))
            return
        if self._num_missed:
            extra_s = min(max(wait_s - draft_s, 0.0), wait_s)
            self._catch_up = (1 - self.SPEED_RATE) * self._catch_up + (extra_s, self._num_missed)
        if self._is_timed and learns and min(requested) == max(requested):
            late_s = self._num_missed * self._catch_up_token_s
            self._draft.observe(len(requested), max(requested), max(wait_s - late_s, wait_s / CostModel.MAX_SURPRISE))
        num_drafted = self._observe_trees(batch, outputs, learns)
        if decode_only:
            speed = num_drafted / max(wait_s + verify_s + sum(self._others_s), 1e-9) / len(requested)
            self.tokens_per_s += self.SPEED_RATE * (speed - self.tokens_per_s) if self.tokens_per_s else speed
        # while all draft, a drafter catches up once, and that does not count as a loss
        most = CostModel.MAX_SURPRISE if self._is_timed else self.MAX_CATCH_UP if self._is_trial else 1.0
        self._account(batch, outputs, min(wait_s, most * draft_s or wait_s))

    def _observe_others(self, between_s: float, host_s: float) -> None:
        """Of the first times the least counts, as a longer one may hide a draft; then a mean."""
        self._num_others += 1
        most, rate = CostModel.MAX_SURPRISE, 0.0 if self._num_others <= DraftCosts.NUM_FIRST else self.SPEED_RATE
        self._others_s = tuple(
            known + rate * (min(own, most * known or own) - known) if rate else min(own, known or own)
            for known, own in zip(self._others_s, (between_s, host_s), strict=True)
        )

    def _with_hidden(self, wait_s: float, between_s: float, draft_s: float) -> float:
        """The wait for a drafter apart after a usual time between the steps: a longer one hid a part of its work.

        draft_s: what the draft is expected to take, 0 if unknown.
        """
        hidden_s = max(between_s - self._others_s[0], 0.0)
        if draft_s and wait_s < self.HIDDEN_SHARE * hidden_s:  # the trees were there, perhaps for long
            return min(wait_s + hidden_s, max(draft_s, wait_s))
        return wait_s + hidden_s

    def _account(self, all_in_step: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], lost_s: float) -> None:
        """Add what the trees of a step lost against plain decoding to the debt, or subtract what they gained.

        A token is worth what it takes in a plain step of as many sequences, and rows cost what they add to the pass.
        """
        num_rows = sum([len(scheduled.slots) for scheduled in all_in_step])
        pairs = zip(all_in_step, outputs, strict=True)
        done = [(len(s.slots), len(o.accepted.tokens)) for s, o in pairs if s.tree is not None and o.accepted]
        batch, num_drafted = len(done), sum([rows - 1 for rows, _ in done])
        if not batch:
            return
        plain_s = self._step_s(batch)
        self._debt_rows = self._debt_rows if self._debt_s else batch
        gain_s = plain_s * (sum([tokens for _, tokens in done]) / batch - 1) - lost_s
        gain_s -= self._verify.seconds(num_rows) - self._verify.seconds(num_rows - num_drafted)
        free_s = min(max(-gain_s, 0.0), self._free_s) if self._num_trials < self.FREE_TRIALS else 0.0
        self._free_s -= free_s
        self._pay(gain_s + free_s)
        if self._is_trial and self._is_behind:
            self._catch_up_s += lost_s
        if not self._is_stopped and self._debt_s > self._catch_up_s + plain_s * (1 + self._stop_debt / batch**0.5):
            self._is_stopped, self._stop_debt = True, self.RESTART_DEBT
            self._debt_s = self._debt_s / 3 if self._is_trial else min(self._debt_s, self.RESTART_DEBT * plain_s)
        elif gain_s > 0:
            self._retry_share = self._retry_share if self._is_trial else self.RETRY_SHARE
            self._stop_debt = min(self._stop_debt + gain_s / plain_s, self.STOP_DEBT)

    def _step_s(self, num_rows: float) -> float:
        """Expected seconds of a step, without its draft."""
        return self._verify.seconds(num_rows) + self._fixed_s

    @property
    def _fixed_s(self) -> float:
        """Expected seconds of a step that do not depend on its rows, without its draft."""
        return sum(self._others_s) + self._context_token_s * self._step.num_context_tokens

    def _pay(self, seconds: float) -> None:
        """Lower the debt; negative seconds raise it."""
        self._debt_s = max(self._debt_s - seconds, 0.0)
        self._is_stopped = self._is_stopped and self._debt_s > 0

    def _chosen(self, decoding: Seq[str], most: int, num_plain: int) -> dict[str, TreeSize]:
        """Sizes of the sequences that draft."""
        full, is_known = self._full(most), not self._recent.num_missing
        scouts, self._scouts = tuple(name for name in self._scouts if name in decoding), ()
        num_rows = len(decoding) + num_plain
        if scouts and self._is_trial and self._goes_on(num_rows):
            self._scouts = scouts
            return dict.fromkeys(scouts, full)
        if self._is_trial:
            self._is_trial, self._plan, self._num_trials = False, None, self._num_trials + 1
            self._debt_s = max(self._debt_s, self.PLAIN_STEPS * self.RETRY_SHARE * self._step_s(num_rows))
            if self._num_trials > self.FREE_TRIALS:
                self._retry_share = max(self._retry_share / 2, self.FAILED_SHARE * self.RETRY_SHARE)
        elif self._waits_for_payment(num_rows):
            return {}
        if not self._is_load_of_debt(num_rows):
            self._retry_share = self.RETRY_SHARE
        plan = self._planned(len(decoding), most, num_plain) if is_known else None
        if plan and plan.size.depth:
            if self._debt_s and not self._is_load_of_debt(num_rows):
                self._pay(self._debt_s)
            if self._is_stopped:
                return {}
            drafting = self._worth_drafting(decoding, plan, num_rows)
            if not drafting:
                return {}
            self._num_drafted += 1
            chosen = dict.fromkeys(drafting, plan.size)
            is_capped = plan.size.nodes == plan.known_size < most
            if plan.size != full and not self._num_drafted % (self.SCOUT_INTERVALS[0] if is_capped else plan.scout_interval):
                self._scouts = self._next_scouts(drafting, full)
                chosen |= dict.fromkeys(self._scouts, full)
            return chosen
        elif self._is_stopped or self._debt_s > 0:
            return {}
        else:
            self._draft.relax()
            if not self._could_pay(len(decoding), num_plain, full):
                return {}  # the plan stays, as it takes longer to make than all else here
            self._plan, self._is_trial, self._catch_up_s = None, True, 0.0
        self._scouts = self._next_scouts(decoding, full)
        self._num_left = -(-self.TRIAL_TREES // len(self._scouts))
        return dict.fromkeys(self._scouts, full)

    def _worth_drafting(self, decoding: Seq[str], plan: Plan, num_rows: int) -> Seq[str]:
        """The sequences that trees save more time than the drafter needs to catch up with them."""
        if plan.pauses:
            return []
        late = {name for name in decoding if not self._sizes.get(name, NO_TREE).depth}
        token_s = self._catch_up_token_s
        if not late or not token_s or not self._step.candidates:
            return decoding
        candidates = self._step.candidates()
        late = {
            name
            for name in late
            if self.CATCH_UP_GAIN * token_s * self._missed_of(name, candidates) > plan.saved_s * candidates[name].num_left
        }
        if not late:
            return decoding
        self._catch_up[0] *= self.RELAXING  # so that they are tried some time, if it was measured wrongly
        drafting = [name for name in decoding if name not in late]
        prompt_rows, count = self._step.num_prompt_rows + num_rows, len(drafting)
        verify_s = self._verify.seconds(prompt_rows + count * plan.tree_rows) - self._verify.seconds(prompt_rows)
        spent_s = verify_s + self._draft.at(count, plan.size)
        return drafting if count * plan.tree_tokens > plan.rate * spent_s else []

    @property
    def _catch_up_token_s(self) -> float:
        """Seconds of the drafter to catch up by a token."""
        seconds, count = self._catch_up
        return float(seconds / count) if count else 0.0

    def _missed(self, names: Seq[str]) -> int:
        """Tokens that the drafter lacks of sequences; 0 if unknown."""
        if not names or not self._step.candidates:
            return 0
        candidates = self._step.candidates()
        return sum(self._missed_of(name, candidates) for name in names)

    def _missed_of(self, name: str, candidates: Mapping[str, Candidate]) -> int:
        """Of a sequence without trees so far, the drafter may have its prompt, but has not computed it."""
        return candidates[name].num_missed if name in self._begun else candidates[name].length

    def _waits_for_payment(self, num_rows: int) -> bool:
        """Whether drafting seemed not worth its cost to about as many sequences, and there is a debt."""
        plan = self._plan
        is_unpaid = self._debt_s > 0 and self._is_load_of_debt(num_rows)
        return plan is not None and is_unpaid and (self._is_stopped or not plan.size.depth)

    def _is_settled(self, num_rows: int) -> bool:
        """Whether few sequences lose little. Their steps are short, so that estimates are worked on more seldom."""
        return num_rows <= self.FEW and self._debt_s <= self.TRIAL_DEBT * self._step_s(num_rows)

    def _is_load_of_debt(self, num_rows: int) -> bool:
        """Whether the debt was made by about as many sequences; else it says nothing about them."""
        return 2 / 3 < num_rows / self._debt_rows < 1.5

    def _goes_on(self, num_rows: int) -> bool:
        """Whether scouts have trees in the next step too."""
        self._num_left -= 1
        most_s = self._catch_up_s + self.TRIAL_DEBT * self._step_s(num_rows)
        return self._is_behind or (self._num_left > 0 and self._debt_s <= most_s)

    def _next_scouts(self, decoding: Seq[str], full: TreeSize) -> tuple[str, ...]:
        """Some sequences, other ones each time."""
        most_s, count = self.SCOUT_COST * self._draft.at(1, full), 1
        while count < min(self.MAX_SCOUTS, len(decoding)) and self._draft.at(count + 1, full) <= most_s:
            count += 1
        first = self._num_scouts % len(decoding)
        self._num_scouts += count
        return tuple([*decoding[first:], *decoding[:first]][:count])

    def _could_pay(self, num_drafting: int, num_plain: int, full: TreeSize) -> bool:
        """Whether chains of a good drafter were worth their cost."""
        num_rows = num_drafting + num_plain
        least = self.MARGIN * num_rows / self._step_s(num_rows)
        for depth in range(1, full.depth + 1):
            tokens = num_rows + num_drafting * sum(self.GOOD_ACCEPTANCE ** (1 + level) for level in range(depth))
            seconds = self._step_s(num_rows + num_drafting * depth)
            if tokens > least * (seconds + self._draft.at(num_drafting, TreeSize(depth + 1, depth))):
                return True
        return False

    def _full(self, most: int) -> TreeSize:
        return TreeSize(most, min(self._tree.num_steps, most - 1))

    def _planned(self, num_drafting: int, most: int, num_plain: int) -> Plan:
        """The best size by the present estimates, at most PLAN_STEPS old."""
        known_size, step = min(self._recent.known_size, most), self._step
        self._plans = self._plans if self._plan else {}
        plan = self._plans.get(step.num_prompt_rows > 0)
        num_rows = num_drafting + num_plain + step.num_prefilling
        all_rows, is_few = num_drafting + num_plain + step.num_prompt_rows, num_rows <= self.FEW
        if plan and plan.known_size == known_size and self._is_fresh(plan, num_rows, all_rows):
            return self._keep(plan)
        chances, weights, depths, places = self._recent.nodes(self._survival, known_size)
        if not len(chances):  # the drafter found nothing
            found = Plan(NO_TREE, known_size, num_rows, True, 1, self._num_steps, step.num_prompt_rows, all_rows)
            return self._keep(found)
        levels_of = _steps(1, self._tree.num_steps)
        sizes = [TreeSize(nodes, depth) for depth in levels_of for nodes in _steps(2, known_size) if depth < nodes]
        nodes, levels = np.array(sizes).T[:, :, None]
        shares = weights * ((places < nodes) & (depths <= levels))
        rows, accepted = np.cumsum(shares, 1), np.cumsum(shares * chances, 1)  # of one tree
        some = slice((len(chances) - 1) % self.CUT_STEP, None, self.CUT_STEP) if self._prunes else slice(-1, None)
        rows, accepted = rows[:, some], accepted[:, some]
        count = num_rows - num_plain
        draft_s = np.array([[self._draft.at(count, size)] for size in sizes])
        seconds = self._verify.at(num_rows + count * rows) + draft_s + self._fixed_s
        rates = (num_rows + count * accepted) / seconds
        best_rate, plain = float(rates.max()), num_rows / self._step_s(num_rows)
        last = plan or self._plan
        is_drafting = not self._is_stopped and (bool(last.size.depth) if last else is_few)
        least_rate = plain * ((self.MARGIN if is_drafting else self.FIRST_MARGIN) - (self.DOUBT if is_few else 0.0))
        as_good = self.AS_GOOD_OF_FEW if is_few else self.AS_GOOD
        good_rate = min(max(as_good * best_rate, least_rate), best_rate)
        first = int(np.argmax(rates.max(axis=1) >= good_rate))
        cuts, pauses = not is_few or bool(rates[first, -1] < good_rate), False
        if step.num_prompt_rows and best_rate > least_rate:
            draft_s = np.array([[self._draft.at(num_drafting, size)] for size in sizes])
            more_s = self._verify.at(all_rows + num_drafting * rows) - self._verify.seconds(all_rows) + draft_s
            gains = num_drafting * accepted - best_rate * more_s
            first, cuts, pauses = int(np.argmax(gains.max(axis=1))), True, bool(gains.max() <= 0)
        size = sizes[first] if best_rate > least_rate else NO_TREE
        if not plan or bool(plan.size.depth) != bool(size.depth):
            what, ratio = f"trees of {size.nodes} nodes" if size.depth else "no trees", best_rate / plain
            log.info("%d sequences draft %s: %.2f of plain", num_drafting, what, ratio, extra={"rate_limited": True})
        if plan and plan.size.depth and not size.depth:
            self._debt_s = min(self._debt_s, self.RESTART_DEBT * self._step_s(num_rows))
        cut = int(np.argmax(rates[first]))
        found = Plan(
            size,
            known_size,
            num_rows,
            cuts,
            self._scout_interval(count, size, most, float(seconds[first, cut]), num_rows + count * float(rows[first, cut])),
            made_at=self._num_steps,
            num_prompt_rows=step.num_prompt_rows,
            all_rows=all_rows,
            pauses=pauses,
            rate=best_rate,
            saved_s=max(1 / plain - 1 / best_rate, 0.0),
            tree_rows=float(rows[first, cut]),
            tree_tokens=float(accepted[first, cut]),
        )
        return self._keep(found)

    def _keep(self, plan: Plan) -> Plan:
        """Take it from now on. There is a choice for steps with prompts, and one for others."""
        self._plan = self._plans[plan.num_prompt_rows > 0] = plan
        return plan

    def _is_fresh(self, plan: Plan, num_rows: int, all_rows: int) -> bool:
        """Whether a plan still holds, for about as many sequences and rows."""
        steps = self.OBSERVE_STEPS if self._is_settled(num_rows) else 1
        most_steps = self.PLAN_STEPS * steps if plan.size.depth else self.MAX_PLAIN_STEPS
        age = self._num_steps - plan.made_at
        most = 1.1 if plan.size.depth and not plan.pauses else 2.0  # prompts differ in length
        rows_ratio, all_ratio = plan.num_rows / num_rows, plan.all_rows / all_rows
        return age < most_steps and 0.9 < rows_ratio < 1.1 and 1 / most < all_ratio < most

    def _scout_interval(self, count: int, size: TreeSize, most: int, step_s: float, num_rows: float) -> int:
        """Steps from scouts to scouts, by what they add to a step. A round takes as long as its largest trees would."""
        full = self._full(most)
        more_s = self._draft.at(count, full) - self._draft.at(count, size)
        more_s += self._verify.seconds(num_rows + full.nodes) - self._verify.seconds(num_rows)
        return int(min(max(more_s / step_s / self.SCOUT_SHARE, self.SCOUT_INTERVALS[0]), self.SCOUT_INTERVALS[1]))

    def _observe_trees(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput], learns: bool) -> int:
        """Learn from the trees of a step. Returns the tokens that their sequences have got."""
        trees, paths, num_tokens, full = list[DraftTree](), list[tuple[int, ...]](), 0, self._full(self._most)
        drafted, self._drafted = self._drafted, {}
        for scheduled, output in zip(batch, outputs, strict=True):
            tree, request = scheduled.tree, scheduled.sequence.request
            if tree is None or output.accepted is None or not self._sizes.get(request.id, NO_TREE).depth:
                continue
            trees.append(tree)
            paths.append(output.accepted.path)
            num_tokens += len(output.accepted.tokens)
            _, whole = drafted.get(id(tree), (tree, tree if tree.sampled or not drafted else None))
            most_levels = len(scheduled.sequence.slots) - scheduled.first - 2  # as the last of the tokens is no drafted one
            is_full = self._sizes[request.id] == full
            if learns and is_full and whole and most_levels >= full.depth:
                self._recent.observe(whole, min(request.num_draft_tokens or self._most, self._most))
        self._prunes = bool(drafted) or not any(tree.num_drafted for tree in trees)
        if learns:
            self._survival.forget()
            self._survival.observe(trees, paths)
        return num_tokens


def _steps(first: int, last: int) -> list[int]:
    """Sizes worth a comparison from the largest down: all small ones, then two for each doubling."""
    return sorted({last, *(n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64) if first <= n < last)}, reverse=True)
