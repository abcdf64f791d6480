"""Builds an engine from loaded parts, and its tensor-parallel workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from eyas.cache.kv_cache import KVCache, bytes_per_slot, free_memory, slots_that_fit
from eyas.cache.state_pools import StatePlan, states_that_fit
from eyas.cache.states import NO_STATES, StateRows, StateSizes
from eyas.config import EngineConfig, TreeConfig
from eyas.config.engine import INT8
from eyas.config.target_limits import check_quantization
from eyas.device.host import report_phase
from eyas.device.memory import explain_out_of_memory, to_huge_pages
from eyas.device.placement import check_int8
from eyas.drafters.base import Drafter
from eyas.emulation.device import Clock, EmulatedBackend, emulated_device
from eyas.engine.budget.measuring import build_draft_budget, cost_clock, has_gpu
from eyas.engine.deterministic import BatchInvariantRunner
from eyas.engine.draft_manager import DraftManager
from eyas.engine.engine import Engine
from eyas.engine.runner import ModelRunner, slot_width
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError
from eyas.kernels.by_device import sampling_kernels
from eyas.kernels.choice import tree_kernels
from eyas.models.backends.base import BackendPlan, ForwardBackend
from eyas.models.backends.cpu import round_rows, share_layers
from eyas.models.backends.cuda import build_backend, plan_backend, release_backend
from eyas.models.backends.pass_memory import reserved_bytes
from eyas.models.checkpoint import CheckpointSource, context_length, open_checkpoint
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.layers.attention import kv_sources
from eyas.models.layers.fused import is_batch_invariant
from eyas.models.loading import check_tensor_parallel, load_target
from eyas.models.parallel.commands import InitKVCache
from eyas.models.parallel.shards import Shard
from eyas.models.parallel.workers import RankInfo, TargetWorkers, Worker, start_workers
from eyas.models.placement import pass_dtype
from eyas.models.target import TargetModel

ROOT_ONLY = TreeConfig(1, 0, 1)
# Recurrent states that the prefix cache may keep, for each sequence that runs.
KEPT_STATES = 2
FOR_WEIGHTS = "free some memory, take a smaller or a quantised model, or raise engine.tensor_parallel_size"
FOR_KV_CACHE = "lower engine.max_kv_tokens if it is set, else engine.gpu_memory_utilization"

Build = Callable[[BackendPlan, TargetModel, KVCache], ForwardBackend]

log = logging.getLogger(__name__)


def load_model(
    target: CheckpointSource,
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
    target = open_checkpoint(target)
    if engine.quantization:
        check_quantization(engine.quantization, target.config, target.path)
    with explain_out_of_memory(f"no memory for the weights of {target.path!r}", device, FOR_WEIGHTS):
        passes = pass_dtype(target, dtype, device, engine)
        if engine.quantization == INT8:
            check_int8(device)
            dtype = INT8
        return load_target(target, dtype, device, layers, engine.max_model_len, shard, passes)


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
    is_exact = target.kv_dtype is None and is_batch_invariant(target.model)
    if workers.size == 1:
        round_rows(target.model, target.weight_dtype, is_exact, engine.deterministic)
    slot_bytes = bytes_per_slot(target.kv_shapes, width, target.dtype, target.kv_dtype, kv_sources(target.config))
    max_model_len = context_length(target.config, engine.max_model_len, target.name_or_path)
    drafted_tree = tree if drafter else ROOT_ONLY
    plan = plan_backend(target, engine, drafted_tree, max_model_len)
    reserved = reserved_bytes(target, plan, engine)
    fraction = engine.gpu_memory_utilization
    states = _plan_states(target, engine, drafted_tree, reserved)
    reserved += states.num_bytes
    num_slots = engine.max_kv_tokens or slots_that_fit(slot_bytes, fraction, target.device, reserved)
    log.info("KV cache: %d tokens, %.2f GiB on %s", num_slots, num_slots * slot_bytes / 2**30, target.device)
    engine = replace(engine, max_kv_tokens=num_slots, max_num_seqs=states.num_running)
    with workers.init_kv_cache(InitKVCache(num_slots, plan, states.sizes)):
        kv_cache = _kv_cache(target, num_slots, width, states.sizes)
        backend = build_backend(plan, target, kv_cache)
        if engine.deterministic:
            runner: ModelRunner = BatchInvariantRunner(target, kv_cache, fuser, tree.num_draft_tokens, backend)
        else:
            if engine.emulated_device:
                backend = EmulatedBackend(backend, emulated_device(engine.emulated_device, target.device, clock))
            runner = ModelRunner(target, kv_cache, fuser, backend, workers)
    sampling_kernels(torch.empty(0, device=target.device)).warm_up(target.vocab_size, target.device)
    workers.before_close(partial(release_backend, runner.backend))
    state_rows = StateRows(states.sizes.rows, engine.max_num_seqs) if states.sizes.rows else None
    scheduler = Scheduler(engine, drafted_tree, target.eos_ids, states=state_rows)
    draft_manager = DraftManager(drafter, runner, engine.acceptance)
    budget_clock = cost_clock(drafter, runner, engine, clock)
    budget = build_draft_budget(drafter, runner, engine, tree, budget_clock)
    pattern = engine.json_whitespace_pattern
    return Engine(scheduler, draft_manager, runner, max_model_len, budget, clock, budget_clock, pattern)


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
    tree_kernels()  # loaded before the first pass
    ready()
    runner = ModelRunner(model, _kv_cache(model, 1), None)
    for command in worker.commands():
        if isinstance(command, InitKVCache):
            release_backend(runner.backend)
            model.set_kv_cache_dtype(command.plan.kv_cache_dtype)
            kv_cache = _kv_cache(model, command.num_slots, states=command.states)
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


def _plan_states(target: TargetModel, engine: EngineConfig, tree: TreeConfig, reserved: int) -> StatePlan:
    """Return the rows for states of recurrent layers, none for targets without such layers.

    They take at most half of the memory that the KV cache may have, and fewer sequences run if that is too little.
    """
    most = engine.max_num_seqs
    if not target.state_shapes:
        return StatePlan(NO_STATES, 0, most)
    free = int((free_memory(target.device) - reserved) * engine.gpu_memory_utilization)
    nodes = tree.num_draft_tokens if tree.num_draft_tokens > 1 else 0
    kept = KEPT_STATES if engine.prefix_cache else 0
    limits = (kept, nodes, engine.max_verify_tokens)
    plan = states_that_fit(target.state_shapes, most, *limits, target.dtype, free // 2)
    log.info("recurrent states: %d rows and %d nodes, %.2f GiB", *plan.sizes, plan.num_bytes / 2**30)
    if plan.num_running < most:
        log.warning("engine.max_num_seqs is %d, but there is memory for the recurrent states of %d", most, plan.num_running)
    return plan


def _kv_cache(target: TargetModel, num_slots: int, feature_width: int = 0, states: StateSizes = NO_STATES) -> KVCache:
    problem = f"no memory for a KV cache of {num_slots} tokens"
    lower = FOR_KV_CACHE
    if states.rows:
        problem += f", {states.rows} recurrent states and {states.stashed} nodes of trees"
        lower = f"lower engine.max_num_seqs or engine.max_verify_tokens, or {FOR_KV_CACHE}"
    with explain_out_of_memory(problem, target.device, lower):
        kv_cache = target.new_kv_cache(num_slots, feature_width, states)
    to_huge_pages([*kv_cache.keys, *kv_cache.values], collapse=False)
    return kv_cache
