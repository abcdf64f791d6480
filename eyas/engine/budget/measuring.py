"""Builds the draft budget of an engine, and times the passes and draft rounds whose costs it has to know."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext, suppress
from functools import partial
from statistics import median

import numpy as np
import torch

from eyas.arrays import Ints
from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import DraftContext, Drafter, LocalDrafter
from eyas.emulation.device import Clock
from eyas.engine.budget.adaptive import AdaptiveDraftBudget
from eyas.engine.budget.base import DraftBudget, FixedDraftBudget
from eyas.engine.budget.costs import CostModel, DraftCosts
from eyas.engine.budget.pair import PairDraftBudget
from eyas.engine.runner import ModelRunner
from eyas.kernels.arguments import UNREACHED, Draws
from eyas.models.inputs import Segment
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.sampling.verify import tokens_of

# Seconds after which each further size is timed once, and those after which none is: the table then goes on along its slope.
REPEAT_LIMIT_S, TIME_LIMIT_S = 0.2, 2.0
LONG_ENOUGH_S = 0.01
# Sizes timed at bends of a table at most, and how far off its time may be there, relative to it, for it to be no bend.
MAX_BENDS, BEND = 4, 0.05
PREFIX_TOKENS = 64
# Tokens of a draft round's first commit, and of one that catches up.
FIRST_TOKENS = 4
LATE_TOKENS = 128
# Prefixes and sequences of the passes that time a context, and seconds of a pass from which that takes too long.
CONTEXT_TOKENS, CONTEXT_SEQUENCES, LONG_PASS_S = 1024, 16, 0.1
GREEDY = NoiseKey(seed=0)

log = logging.getLogger(__name__)


def build_draft_budget(
    drafter: Drafter | None, runner: ModelRunner, engine: EngineConfig, tree: TreeConfig, clock: Callable[[], float]
) -> DraftBudget:
    """Return the budget that `engine.draft_budget` names, and what it has to know of costs."""
    if drafter is None or engine.draft_budget == "fixed":
        return FixedDraftBudget()
    verify = measure_verify(runner, engine, tree, clock, drafter.needs.samples)
    context_token_s = measure_context(runner, engine, clock)
    local = drafter if isinstance(drafter, LocalDrafter) else None

    def budget(name: str, lookups_alone: bool = False) -> AdaptiveDraftBudget:
        draft = DraftCosts(None, None, tree.top_k)  # nothing is known of a drafter in another process
        if local:
            draft = measure_drafting(local, runner, engine, tree, clock, lookups_alone)
        return AdaptiveDraftBudget(tree, verify, draft, local is None, context_token_s, name)

    both = budget("drafts")
    most, times = max(verify.sizes), (float(1000 * verify.at(size)) for size in (1, max(verify.sizes)))
    log.info("draft budget: verify passes of 1 and %d rows take %.2f and %.2f ms", most, *times)
    if local and not local.has_lookups:
        return both
    return PairDraftBudget(both, budget("drafts by lookups alone", lookups_alone=True), lambda: drafter.has_lookups)


def cost_clock(drafter: Drafter | None, runner: ModelRunner, engine: EngineConfig, clock: Clock) -> Callable[[], float]:
    """Return the clock that a draft budget measures costs with.

    It is the processor time of this process where one thread does all work of a step: the wall would count other
    processes' work too. A GPU, other threads or a drafter in another process work while this thread waits, which only
    the wall shows.
    """
    num_threads = max(torch.get_num_threads(), engine.layer_threads, engine.tensor_parallel_size)
    is_alone = isinstance(drafter, LocalDrafter) and num_threads == 1 and not has_gpu(engine, runner.target.device)
    return time.process_time if is_alone and type(clock) is Clock else clock


def has_gpu(engine: EngineConfig, device: torch.device) -> bool:
    """Return whether passes run on a GPU, real or emulated."""
    return device.type != "cpu" or bool(engine.emulated_device)


def measure_verify(
    runner: ModelRunner, engine: EngineConfig, tree: TreeConfig, clock: Callable[[], float], needs_samples: bool = False
) -> CostModel:
    """Return the seconds of a verify pass and its draws by number of rows.

    Rows are written to the scratch slot, so that none leaks. They are trees of the largest size, with a draw at each root.

    Args:
        needs_samples: whether the drafter needs a token of every node.
    """
    nodes, num_slots = tree.num_draft_tokens, runner.kv_cache.scratch
    target, most = runner.target, min(engine.max_verify_tokens, engine.max_num_seqs * tree.num_draft_tokens)
    tokens = different_tokens(target.vocab_size, most)
    prefix = np.arange(max(min(PREFIX_TOKENS, num_slots, runner.target.max_model_len - nodes), 0))

    def segment(start: int, num_rows: int) -> Segment:
        rows, own = np.arange(num_rows), tokens[start : start + num_rows]
        return Segment(own, len(prefix) + rows, np.full(num_rows, num_slots), prefix, None, rows, GREEDY)

    def rounds(num_rows: int) -> Iterator[Callable[[], object]]:
        segments = [segment(start, min(nodes, num_rows - start)) for start in range(0, num_rows, nodes)]
        draws = Draws([GREEDY], np.zeros(num_rows, np.int64), num_rows)
        if not needs_samples:  # all nodes are children of a root, whose draw leads to none of them
            draws = draws.along(np.arange(num_rows) // nodes * nodes, np.full(num_rows, UNREACHED))
        while True:
            yield lambda: tokens_of(runner.forward(segments), draws).tolist()

    growth = 2 if target.is_mixture_of_experts else 4  # the first rows each find experts that no other one has
    return measure_sizes(rounds, most, clock, nodes, growth)


def different_tokens(vocab_size: int, count: int) -> Ints:
    """Return tokens that go to different experts, as a tree's do [count]. Equal ones would share theirs."""
    return np.random.default_rng(0).integers(0, vocab_size, count)


def measure_context(runner: ModelRunner, engine: EngineConfig, clock: Callable[[], float]) -> float:
    """Return the seconds of a verify pass for each cached token that its rows attend to, from short and from long prefixes.

    A GPU reads the context of a sequence once for all of its rows. On a CPU it is a cost of each row: 0 here, as for passes
    that take long, and for models with sliding windows, which bound what a context costs.
    """
    num_slots, count = runner.kv_cache.scratch, min(engine.max_num_seqs, CONTEXT_SEQUENCES)
    longest = min(CONTEXT_TOKENS, num_slots, runner.target.max_model_len - 1)
    has_window = getattr(runner.target.config, "sliding_window", None)
    if longest < 2 * PREFIX_TOKENS or has_window or not has_gpu(engine, runner.target.device):
        return 0.0

    def rounds(length: int) -> Iterator[Callable[[], object]]:
        zero, draws = np.zeros(1, np.int64), Draws([GREEDY], [0] * count, count)
        prefixes = [(number * longest + np.arange(length)) % num_slots for number in range(count)]
        segments = [Segment(zero, zero + length, zero + num_slots, prefix, None, zero, GREEDY) for prefix in prefixes]
        while True:
            yield lambda: tokens_of(runner.forward(segments), draws).tolist()

    def seconds(length: int) -> float:
        works = rounds(length)
        next(works)()
        return _median_seconds(works, clock, 3)

    short_s = seconds(PREFIX_TOKENS)
    return max(seconds(longest) - short_s, 0.0) / (count * (longest - PREFIX_TOKENS)) if short_s < LONG_PASS_S else 0.0


def measure_drafting(
    drafter: LocalDrafter,
    runner: ModelRunner,
    engine: EngineConfig,
    tree: TreeConfig,
    clock: Callable[[], float],
    lookups_alone: bool = False,
) -> DraftCosts:
    """Return the seconds of draft rounds. lookups_alone: see Commit."""
    num_rows = max(min(tree.num_draft_tokens - 1, tree.top_k), 1)
    budget, epochs = TreeBudget(num_rows + 1, 1), itertools.count()
    tokens = different_tokens(runner.target.vocab_size, engine.max_num_seqs + LATE_TOKENS)
    num_late = min(LATE_TOKENS, runner.kv_cache.scratch, runner.target.max_model_len)

    def context(session: int, epoch: int, start: int, num_tokens: int) -> DraftContext:
        slots = np.arange(num_tokens if start else num_tokens - 1) % runner.kv_cache.scratch
        features = runner.features(slots) if drafter.needs.features and not lookups_alone else None
        own = tuple(tokens[session : session + num_tokens].tolist())
        commit = Commit(f"warm-up {session}", epoch, start, own, features, GREEDY, budget)
        return commit._replace(lookups_alone=lookups_alone)

    def round_of(num_trees: int, *of_session: int) -> object:
        """Time a round with the features, which a CPU fuses for it."""
        return drafter.request([context(session, *of_session) for session in range(num_trees)])()

    def rounds(num_trees: int) -> Iterator[Callable[[], object]]:
        start, num_tokens, epoch = 0, FIRST_TOKENS, next(epochs)
        while True:
            yield partial(round_of, num_trees, epoch, start, num_tokens)
            start, num_tokens = start + num_tokens, 2

    def first_rounds(num_tokens: int) -> Iterator[Callable[[], object]]:
        while True:
            yield partial(round_of, 1, next(epochs), 0, num_tokens)

    try:
        first = measure_sizes(rounds, engine.max_num_seqs, clock)
        next(first_rounds(num_late))()
        few_s, many_s = (_median_seconds(first_rounds(n), clock, 1) for n in (num_late // 4, num_late))
        budget = TreeBudget(tree.num_draft_tokens, tree.num_steps)
        whole = measure_sizes(rounds, engine.max_num_seqs, clock)
    finally:
        drafter.release([f"warm-up {session}" for session in range(engine.max_num_seqs)])
    level = [max(float(whole.at(n) - first.at(n)), 0.0) / max(tree.num_steps - 1, 1) for n in whole.sizes]
    levels = CostModel([n * num_rows for n in whole.sizes], level)
    return DraftCosts(first, levels, tree.top_k, max(many_s - few_s, 0.0) / (num_late - num_late // 4))


def measure_sizes(
    rounds: Callable[[int], Iterator[Callable[[], object]]],
    largest: int,
    clock: Callable[[], float],
    needed: int = 1,
    growth: int = 4,
) -> CostModel:
    """Time sizes 1, 4, 16, 32 and so on up to `largest`, and then where the slope may change between two of them.

    A size has one round that does not count. Its time is the median of some rounds, or that of one after REPEAT_LIMIT_S. If
    that is not reached, all sizes are timed again, and the lesser times count: other work slows a machine down for a while,
    and what counts is how sizes compare. Sizes up to `needed` are timed however long it takes.

    Args:
        growth: from one size to the next, below 16.
    """
    table: dict[int, float] = {}
    began, size = clock(), 1

    def time_size(size: int) -> bool:
        """Time a size if it is needed or there is time, and memory. Returns whether it was timed."""
        passed, last = clock() - began, max(table.values(), default=0.0)
        is_needed = len(table) < 2 or max(table) < needed
        if not is_needed and passed + 2 * last * max(size / max(table), 1) > TIME_LIMIT_S:
            return False
        works = rounds(size)
        with suppress(torch.OutOfMemoryError) if table else nullcontext():
            next(works)()
            seconds = _median_seconds(works, clock, 3 if passed < REPEAT_LIMIT_S else 1)
            table[size] = min(seconds, table.get(size, seconds))
            return True
        torch.cuda.empty_cache()
        return False

    while time_size(size) and size < largest:
        size = min((growth if size < 16 else 2) * size, largest)
    for _ in range(MAX_BENDS):
        bend = _bend(sorted(table), [table[size] for size in sorted(table)])
        if bend in table or not bend or not time_size(bend):
            break
    if clock() - began < REPEAT_LIMIT_S:
        for size in sorted(table):
            time_size(size)
    if max(table) < largest:
        reason = "as they take too long or too much memory"
        log.warning("timed sizes up to %d of %d; larger ones are estimated, %s", max(table), largest, reason)
    # a pause of the machine makes a size look too slow; no larger one that was faster may count as slow as that
    seconds = [min(own for larger, own in table.items() if larger >= size) for size in sorted(table)]
    return CostModel(sorted(table), seconds)


def _bend(sizes: Seq[int], seconds: Seq[float]) -> int:
    """Return the size where a convex table may be too high by most, if by more than BEND of it, else 0.

    Between two sizes a convex function lies above the lines through the two sizes before and through the two after. Of a
    roofline, flat and then linear, these meet at its bend.
    """
    slopes = [0.0, *((b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(zip(sizes, seconds, strict=True)))]
    worst, found = BEND, 0
    for i in range(len(sizes) - 2):
        before, within, after = slopes[i : i + 3]
        if before < within < after:
            # the line before, from the left size, meets the line after, back from the right size
            width = ((after - within) / (after - before)) * (sizes[i + 1] - sizes[i])
            surplus = (within - before) * width / (seconds[i] + within * width)
            if surplus > worst:
                worst, found = surplus, sizes[i] + round(width)
    return found


def _median_seconds(works: Iterator[Callable[[], object]], clock: Callable[[], float], least: int) -> float:
    """Return the median time of as many works as take about LONG_ENOUGH_S, up to 7: the fastest one were too good for steps
    between other work.
    """
    seconds: list[float] = []
    while len(seconds) < least or (len(seconds) < 7 and math.fsum(seconds) < LONG_ENOUGH_S):
        work = next(works)
        began = clock()
        work()
        seconds.append(clock() - began)
    return median(seconds)
