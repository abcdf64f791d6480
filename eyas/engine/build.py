"""Builds an engine from loaded parts, and the tensor-parallel workers beside it.

With an adaptive draft budget, verify passes and draft rounds are timed first, so that it knows their costs.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import torch

from eyas.cache.kv_cache import KVCache, bytes_per_slot, slots_that_fit
from eyas.config import EngineConfig, TreeConfig
from eyas.config.target_limits import check_quantization
from eyas.device.host import report_phase
from eyas.device.memory import explain_out_of_memory, to_huge_pages
from eyas.drafters.base import DraftContext, Drafter, LocalDrafter
from eyas.emulation.device import Clock, EmulatedBackend, emulated_device
from eyas.engine.deterministic import BatchInvariantRunner
from eyas.engine.draft_budget import AdaptiveDraftBudget
from eyas.engine.draft_costs import CostModel, DraftBudget, DraftCosts, FixedDraftBudget
from eyas.engine.draft_manager import DraftManager
from eyas.engine.engine import Engine
from eyas.engine.runner import ModelRunner, slot_width
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError
from eyas.kernels.arguments import Draw
from eyas.models.backends.base import BackendPlan, ForwardBackend
from eyas.models.backends.cpu import share_layers
from eyas.models.backends.cuda import build_backend, plan_backend, release_backend
from eyas.models.backends.pass_memory import reserved_bytes
from eyas.models.checkpoint import context_length, read_config, resolve
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.inputs import Segment
from eyas.models.layers.attention import kv_sources
from eyas.models.loading import check_tensor_parallel, load_target
from eyas.models.parallel.commands import InitKVCache
from eyas.models.parallel.shards import Shard
from eyas.models.parallel.workers import RankInfo, TargetWorkers, Worker, start_workers
from eyas.models.target import TargetModel
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.sampling.packed_trees import kernels
from eyas.sampling.sampler import warm_up
from eyas.sampling.verify import tokens_of

ROOT_ONLY = TreeConfig(1, 0, 1)
# Seconds after which each further size is timed once, and those after which none is: the table then goes on along its slope.
REPEAT_LIMIT_S, TIME_LIMIT_S = 0.2, 2.0
LONG_ENOUGH_S = 0.02
# Sizes timed at bends of a table at most, and how far off its time may be there, relative to it, for it to be no bend.
MAX_BENDS, BEND = 4, 0.05
PREFIX_TOKENS = 64
# Prefixes and sequences of the passes that time a context, and seconds of a pass from which that takes too long.
CONTEXT_TOKENS, CONTEXT_SEQUENCES, LONG_PASS_S = 1024, 16, 0.1
GREEDY = NoiseKey(seed=0)
FOR_WEIGHTS = "free some memory, take a smaller or a quantised model, or raise engine.tensor_parallel_size"
FOR_KV_CACHE = "lower engine.max_kv_tokens if it is set, else engine.gpu_memory_utilization"

Build = Callable[[BackendPlan, TargetModel, KVCache], ForwardBackend]

log = logging.getLogger(__name__)


def load_model(
    target: str,
    fuser: FeatureFuser | None,
    dtype: str,
    device: str,
    engine: EngineConfig,
    workers: TargetWorkers | None = None,
) -> TargetModel:
    """Load the target, or rank 0's shard of it, with the auxiliary hidden states that `fuser` needs.

    Raises CheckpointError, OutOfMemory, and ConfigError for weights that `engine.quantization` does not name.
    """
    shard = Shard(0, workers.size) if workers and workers.size > 1 else None
    layers = fuser.aux_hidden_state_layers if fuser else ()
    report_phase("loading")
    if engine.quantization:
        check_quantization(engine.quantization, read_config(resolve(target)), target)
    with explain_out_of_memory(f"no memory for the weights of {target!r}", device, FOR_WEIGHTS):
        return load_target(target, dtype, device, layers, engine.max_model_len, shard)


def assemble_engine(
    target: TargetModel,
    fuser: FeatureFuser | None,
    engine: EngineConfig,
    tree: TreeConfig,
    drafter: Drafter | None,
    workers: TargetWorkers | None = None,
    clock: Clock | None = None,
) -> Engine:
    """Make an engine of loaded parts. Without a drafter no slots are reserved for trees.

    clock: of its measurements and of an emulated device, by default the real one.

    Raises OutOfMemory when the device has too little, and ConfigError when the drafter does not suit the acceptance rule,
    when the workers are not as many as `engine.tensor_parallel_size` says, and for a max_model_len above the target's.
    """
    workers, clock = workers or TargetWorkers(), clock or Clock()
    if workers.size != engine.tensor_parallel_size:
        raise ConfigError(
            f"engine.tensor_parallel_size is {engine.tensor_parallel_size}, but the target is loaded for {workers.size}"
        )
    report_phase("compiling")
    fuser = fuser.to(target.dtype) if fuser else None
    width = slot_width(fuser, has_gpu(engine, target.device))
    target.set_kv_cache_dtype(engine.kv_cache_dtype)
    share_layers(target.model, engine.layer_threads, target.kv_dtype is not None)
    slot_bytes = bytes_per_slot(target.kv_shapes, width, target.dtype, target.kv_dtype, kv_sources(target.config))
    max_model_len = context_length(target.config, engine.max_model_len, target.name_or_path)
    drafted_tree = tree if drafter else ROOT_ONLY
    plan = plan_backend(target, engine, drafted_tree, max_model_len)
    reserved = reserved_bytes(target, plan, engine)
    fraction = engine.gpu_memory_utilization
    num_slots = engine.max_kv_tokens or slots_that_fit(slot_bytes, fraction, target.device, reserved)
    log.info("KV cache: %d tokens, %.2f GiB on %s", num_slots, num_slots * slot_bytes / 2**30, target.device)
    engine = replace(engine, max_kv_tokens=num_slots)
    with workers.init_kv_cache(num_slots, plan):
        kv_cache = _kv_cache(target, num_slots, width)
        backend = build_backend(plan, target, kv_cache)
        if engine.deterministic:
            runner: ModelRunner = BatchInvariantRunner(target, kv_cache, fuser, tree.num_draft_tokens, backend)
        else:
            if engine.emulated_device:
                backend = EmulatedBackend(backend, emulated_device(engine.emulated_device, target.device, clock))
            runner = ModelRunner(target, kv_cache, fuser, backend, workers)
    warm_up(target.vocab_size, target.device)
    workers.before_close(partial(release_backend, runner.backend))
    scheduler = Scheduler(engine, drafted_tree, target.eos_ids)
    draft_manager = DraftManager(drafter, runner, engine.acceptance)
    cost_clock = _cost_clock(drafter, runner, engine, clock)
    budget = _draft_budget(drafter, runner, engine, tree, cost_clock)
    pattern = engine.json_whitespace_pattern
    return Engine(scheduler, draft_manager, runner, max_model_len, budget, clock, cost_clock, pattern)


def _cost_clock(drafter: Drafter | None, runner: ModelRunner, engine: EngineConfig, clock: Clock) -> Callable[[], float]:
    """Return the clock that a draft budget measures costs with.

    It is the processor time of this process where one thread does all work of a step: the wall would count other
    processes' work too. A GPU, other threads or a drafter in another process work while this thread waits, which only
    the wall shows.
    """
    num_threads = max(torch.get_num_threads(), engine.layer_threads, engine.tensor_parallel_size)
    is_alone = isinstance(drafter, LocalDrafter) and num_threads == 1 and not has_gpu(engine, runner.target.device)
    return time.process_time if is_alone and type(clock) is Clock else clock


def _draft_budget(
    drafter: Drafter | None, runner: ModelRunner, engine: EngineConfig, tree: TreeConfig, clock: Callable[[], float]
) -> DraftBudget:
    """Return the budget that `engine.draft_budget` names, and what it has to know of costs."""
    if drafter is None or engine.draft_budget == "fixed":
        return FixedDraftBudget()
    verify = measure_verify(runner, engine, tree, clock)
    context_token_s = measure_context(runner, engine, clock)
    draft = measure_drafting(drafter, runner, engine, tree, clock)
    most, times = max(verify.sizes), (float(1000 * verify.at(size)) for size in (1, max(verify.sizes)))
    log.info("draft budget: verify passes of 1 and %d rows take %.2f and %.2f ms", most, *times)
    return AdaptiveDraftBudget(tree, verify, draft, not isinstance(drafter, LocalDrafter), context_token_s)


def has_gpu(engine: EngineConfig, device: torch.device) -> bool:
    """Return whether passes run on a GPU, real or emulated."""
    return device.type != "cpu" or bool(engine.emulated_device)


def gather_ranks(rank: RankInfo, target: str, dtype: str, max_model_len: int = 0) -> TargetWorkers:
    """Start the other ranks beside rank 0. They begin to load the target, and rank 0 must load its shard too.

    Raises CheckpointError when the target cannot be sharded over that many ranks, Unavailable when they do not connect.
    """
    if rank.size == 1:
        return TargetWorkers()
    check_tensor_parallel(target, rank.size)
    return start_workers(rank, partial(run_worker, target, dtype, max_model_len))


def run_worker(
    target: str,
    dtype: str,
    max_model_len: int,
    rank: RankInfo,
    ready: Callable[[], None] = lambda: None,
    build: Build = build_backend,
) -> None:
    """Be a rank other than 0: connect, load a shard, call `ready`, and run what rank 0 runs until it stops.

    build: makes the backend that rank 0 has planned. Raises Unavailable when rank 0 is gone,
    CheckpointError when the target does not load, ConfigError when the planned backend cannot run here.
    """
    worker = Worker(rank)
    with explain_out_of_memory(f"no memory for a part of the weights of {target!r}", rank.device, FOR_WEIGHTS):
        model = load_target(target, dtype, rank.device, (), max_model_len, Shard(rank.rank, rank.size))
    kernels()  # loaded before the first pass
    ready()
    runner = ModelRunner(model, _kv_cache(model, 1), None)
    for command in worker.commands():
        if isinstance(command, InitKVCache):
            release_backend(runner.backend)
            model.set_kv_cache_dtype(command.plan.kv_cache_dtype)
            kv_cache = _kv_cache(model, command.num_slots)
            runner = ModelRunner(model, kv_cache, None, build(command.plan, model, kv_cache))
        else:
            try:
                runner.forward(command)
            except torch.OutOfMemoryError as error:
                log.warning("rank %d has no memory for a pass: %s", rank.rank, str(error).splitlines()[0])
                worker.report(False)
            else:
                worker.report(True)
    release_backend(runner.backend)
    worker.close()


def _kv_cache(target: TargetModel, num_slots: int, feature_width: int = 0) -> KVCache:
    with explain_out_of_memory(f"no memory for a KV cache of {num_slots} tokens", target.device, FOR_KV_CACHE):
        kv_cache = target.new_kv_cache(num_slots, feature_width)
    to_huge_pages([*kv_cache.keys, *kv_cache.values], collapse=False)
    return kv_cache


def measure_verify(runner: ModelRunner, engine: EngineConfig, tree: TreeConfig, clock: Callable[[], float]) -> CostModel:
    """Return the seconds of a verify pass and its draws by number of rows. Rows are written to the scratch slot, so that
    none leaks.
    """
    nodes, num_slots = tree.num_draft_tokens, runner.kv_cache.scratch
    prefix = np.arange(max(min(PREFIX_TOKENS, num_slots, runner.target.max_model_len - nodes), 0))

    def segment(num_rows: int) -> Segment:
        rows = np.arange(num_rows)
        return Segment(rows * 0, len(prefix) + rows, np.full(num_rows, num_slots), prefix, None, rows, GREEDY)

    def rounds(num_rows: int) -> Iterator[Callable[[], object]]:
        segments = [segment(min(nodes, num_rows - start)) for start in range(0, num_rows, nodes)]
        draws = [Draw(GREEDY, 0)] * num_rows
        while True:
            yield lambda: tokens_of(runner.forward(segments), draws)

    return _measure(rounds, min(engine.max_verify_tokens, engine.max_num_seqs * nodes), clock, needed=nodes)


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
        zero, draws = np.zeros(1, np.int64), [Draw(GREEDY, 0)] * count
        prefixes = [(number * longest + np.arange(length)) % num_slots for number in range(count)]
        segments = [Segment(zero, zero + length, zero + num_slots, prefix, None, zero, GREEDY) for prefix in prefixes]
        while True:
            yield lambda: tokens_of(runner.forward(segments), draws)

    def seconds(length: int) -> float:
        works = rounds(length)
        next(works)()
        return _median_seconds(works, clock, 3)

    short_s = seconds(PREFIX_TOKENS)
    return max(seconds(longest) - short_s, 0.0) / (count * (longest - PREFIX_TOKENS)) if short_s < LONG_PASS_S else 0.0


def measure_drafting(
    drafter: Drafter, runner: ModelRunner, engine: EngineConfig, tree: TreeConfig, clock: Callable[[], float]
) -> DraftCosts:
    """Return the seconds of draft rounds; nothing is known of a drafter in another process."""
    if not isinstance(drafter, LocalDrafter):
        return DraftCosts(None, None, tree.top_k)
    num_rows = max(min(tree.num_draft_tokens - 1, tree.top_k), 1)
    budget, epochs = TreeBudget(num_rows + 1, 1), itertools.count()

    def context(session: int, epoch: int, start: int, num_tokens: int) -> DraftContext:
        slots = np.arange(num_tokens if start else num_tokens - 1) % runner.kv_cache.scratch
        features = runner.features(slots) if drafter.needs.features else None
        return Commit(f"warm-up {session}", epoch, start, (0,) * num_tokens, features, GREEDY, budget)

    def round_of(num_trees: int, *of_session: int) -> object:
        """Time a round with the features, which a CPU fuses for it."""
        return drafter.request([context(session, *of_session) for session in range(num_trees)])()

    def rounds(num_trees: int) -> Iterator[Callable[[], object]]:
        start, num_tokens, epoch = 0, 4, next(epochs)
        while True:
            yield partial(round_of, num_trees, epoch, start, num_tokens)
            start, num_tokens = start + num_tokens, 2

    try:
        first = _measure(rounds, engine.max_num_seqs, clock)
        budget = TreeBudget(tree.num_draft_tokens, tree.num_steps)
        whole = _measure(rounds, engine.max_num_seqs, clock)
    finally:
        drafter.release([f"warm-up {session}" for session in range(engine.max_num_seqs)])
    level = [max(float(whole.at(n) - first.at(n)), 0.0) / max(tree.num_steps - 1, 1) for n in whole.sizes]
    return DraftCosts(first, CostModel([n * num_rows for n in whole.sizes], level), tree.top_k)


def _measure(
    rounds: Callable[[int], Iterator[Callable[[], object]]],
    largest: int,
    clock: Callable[[], float],
    needed: int = 1,
) -> CostModel:
    """Time sizes 1, 4, 16, 32 and so on up to `largest`, and then where the slope may change between two of them.

    A size has one round that does not count. Its time is the median of some rounds, or that of one after REPEAT_LIMIT_S.
    Sizes up to `needed` are timed however long it takes.
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
            table[size] = _median_seconds(works, clock, 3 if passed < REPEAT_LIMIT_S else 1)
            return True
        torch.cuda.empty_cache()
        return False

    while time_size(size) and size < largest:
        size = min((4 if size < 16 else 2) * size, largest)
    for _ in range(MAX_BENDS):
        bend = _bend(sorted(table), [table[size] for size in sorted(table)])
        if bend in table or not bend or not time_size(bend):
            break
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
