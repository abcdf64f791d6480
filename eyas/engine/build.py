"""Puts an engine together: where the weights are in, an Engine out; and the ranks that share the work, if there are more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from eyas.cache.kv_cache import KVCache, bytes_per_slot, slots_that_fit
from eyas.config import EngineConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.engine.draft_budget import AdaptiveDraftBudget, FixedDraftBudget
from eyas.engine.draft_manager import DraftManager
from eyas.engine.engine import Engine
from eyas.engine.runner import BatchInvariantRunner, ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError
from eyas.models.cpu import to_huge_pages
from eyas.models.cuda.backend import BackendPlan, ForwardBackend, build_backend, plan_backend, release_backend
from eyas.models.heads.features import FeatureFuser
from eyas.models.target import TargetModel, check_tensor_parallel, load_target
from eyas.models.tensor_parallel import Shard
from eyas.models.workers import InitKVCache, RankInfo, SingleWorker, TargetWorkers, Worker, start_workers

PLAIN = TreeConfig(1, 0, 1)

Build = Callable[[BackendPlan, TargetModel, KVCache, int], ForwardBackend]

log = logging.getLogger(__name__)


def build_engine(
    target: str,
    fuser: FeatureFuser | None,
    dtype: str,
    device: str,
    engine: EngineConfig,
    tree: TreeConfig,
    drafter: Drafter | None,
    ranks: TargetWorkers | None = None,
) -> Engine:
    """Load `target`, with the taps that `fuser` makes features of; without one none are collected.

    ranks: what `gather_ranks` gave, if the target is shared; they are not closed here.
    """
    return assemble_engine(load_model(target, fuser, dtype, device, engine, ranks), fuser, engine, tree, drafter, ranks)


def load_model(
    target: str,
    fuser: FeatureFuser | None,
    dtype: str,
    device: str,
    engine: EngineConfig,
    ranks: TargetWorkers | None = None,
) -> TargetModel:
    """The target, or rank 0's share of it, with the taps that `fuser` makes features of."""
    share = Shard(0, ranks.size) if ranks and ranks.size > 1 else None
    return load_target(target, dtype, device, fuser.aux_hidden_state_layers if fuser else (), engine.max_model_len, share)


def assemble_engine(
    target: TargetModel,
    fuser: FeatureFuser | None,
    engine: EngineConfig,
    tree: TreeConfig,
    drafter: Drafter | None,
    ranks: TargetWorkers | None = None,
) -> Engine:
    """An engine over loaded parts. Without a drafter no room is kept for trees. Raises ConfigError for a drafter that does
    not suit the acceptance rule, when the ranks are not as many as `engine.tensor_parallel_size` says, and for deterministic mode
    with more than one, before any of them makes room for slots."""
    ranks = ranks or SingleWorker()
    if ranks.size != engine.tensor_parallel_size:
        raise ConfigError(
            f"engine.tensor_parallel_size is {engine.tensor_parallel_size}, but the target is loaded for {ranks.size}"
        )
    if engine.deterministic and ranks.size > 1:
        raise ConfigError("engine.deterministic needs engine.tensor_parallel_size 1: sums over ranks have no fixed order")
    fuser = fuser.to(target.dtype) if fuser else None
    width = fuser.width if fuser else 0
    slot_bytes = bytes_per_slot(target.kv_shapes, width, target.dtype)
    num_slots = engine.max_kv_tokens or slots_that_fit(slot_bytes, engine.gpu_memory_utilization, target.device)
    log.info("KV cache: %d tokens, %.2f GiB on %s", num_slots, num_slots * slot_bytes / 2**30, target.device)
    engine = replace(engine, max_kv_tokens=num_slots)
    context_length = min(engine.max_model_len or target.max_model_len, target.max_model_len)
    tree_rows = tree if drafter else PLAIN
    plan = plan_backend(target, engine, tree_rows, context_length)
    with ranks.init_kv_cache(num_slots, plan):
        pools = _pools(target, num_slots, width)
        if engine.deterministic:
            runner: ModelRunner = BatchInvariantRunner(target, pools, fuser, tree.num_draft_tokens)
        else:
            runner = ModelRunner(target, pools, fuser, build_backend(plan, target, pools, pools.scratch), ranks)
    ranks.before_close(partial(release_backend, runner.passes))
    scheduler = Scheduler(engine, tree_rows, target.eos_ids)
    budget = AdaptiveDraftBudget(tree_rows.num_draft_tokens) if engine.draft_budget == "adaptive" else FixedDraftBudget()
    return Engine(scheduler, DraftManager(drafter, runner, engine.acceptance), runner, context_length, budget)


def gather_ranks(place: RankInfo, target: str, dtype: str, context_length: int = 0) -> TargetWorkers:
    """The other ranks of `place`, which is rank 0's; they begin to load the target, and rank 0 must load its share too.

    Raises CheckpointError when the target cannot be shared by so many, Unavailable when they do not come together.
    """
    if place.size == 1:
        return SingleWorker()
    check_tensor_parallel(target, place.size)
    return start_workers(place, partial(follow, target, dtype, context_length))


def follow(
    target: str,
    dtype: str,
    context_length: int,
    place: RankInfo,
    ready: Callable[[], None] = lambda: None,
    build: Build = lambda plan, target, pools, scratch: build_backend(plan, target, pools, scratch, iter),
) -> None:
    """What every other rank does: join, load its share, call `ready`, and run what rank 0 runs until it stops.

    build: the passes that rank 0 has planned, without its progress bar. Raises Unavailable when rank 0 is gone,
    CheckpointError when the target does not load, ConfigError when passes cannot run here as planned.
    """
    follower = Worker(place)
    model = load_target(target, dtype, place.device, (), context_length, Shard(place.rank, place.size))
    ready()
    runner = ModelRunner(model, _pools(model, 1), None)
    for order in follower.commands():
        if isinstance(order, InitKVCache):
            release_backend(runner.passes)
            pools = _pools(model, order.num_slots)
            runner = ModelRunner(model, pools, None, build(order.plan, model, pools, pools.scratch))
        else:
            runner.run(order.segments)
    release_backend(runner.passes)
    follower.close()


def _pools(target: TargetModel, num_slots: int, feature_width: int = 0) -> KVCache:
    pools = KVCache(num_slots, target.kv_shapes, feature_width, target.dtype, target.device)
    to_huge_pages([*pools.keys, *pools.values])
    return pools
