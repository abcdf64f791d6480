"""The verifier service: `python -m eyas.services.verifier --config FILE --set key=value`.

The ranks of a tensor-parallel verifier read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the environment,
as torchrun sets them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import torch

from eyas.config import DraftingConfig, VerifierConfig
from eyas.config.engine import INT8
from eyas.device.placement import runs_compiled, use_threads
from eyas.device.processor import adds_products_of_bytes
from eyas.drafters.base import Drafter, DrafterNeeds
from eyas.drafters.draft_head import DraftHead
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.build import assemble_engine, gather_ranks, load_model, run_worker
from eyas.engine.engine import Engine
from eyas.errors import ConfigError
from eyas.models.backends.packed_weights import multiplies_tiles
from eyas.models.checkpoint import Checkpoint
from eyas.models.fingerprints import target_fingerprint
from eyas.models.generation_config import sampling_defaults
from eyas.models.parallel.workers import RankInfo, TargetWorkers
from eyas.models.placement import pass_dtype, resolve_placement
from eyas.protocol.commit import Proposal
from eyas.rpc.channel import Peers
from eyas.rpc.messages import ModelInfo, TargetInfo
from eyas.rpc.server import GENERATION_SERVICE
from eyas.services.discovery.base import Discovery, cancel_task, repeat
from eyas.services.discovery.probing import build_discovery
from eyas.services.discovery.redis_registry import lease_registry
from eyas.services.lifecycle import (
    WORKER_SERVICE,
    AnnouncedWorker,
    ProcessRunner,
    ServiceRunner,
    WorkerRegistration,
    serve,
    service_app,
    worker_server,
)
from eyas.services.verifier.chunk_feeds import ChunkFeeds
from eyas.services.verifier.draft_pool import DraftPool
from eyas.services.verifier.load_log import LoadLog
from eyas.services.verifier.servicer import GenerationServicer, announced_load
from eyas.services.verifier.telemetry import VerifierTelemetry
from eyas.telemetry.exporters import Telemetry, telemetry
from eyas.v1 import generation_pb2_grpc

# When a rank is gone, rank 0 may hang in an all-reduce forever, as in a stuck step: the system ends the process after this.
END_SECONDS = 15

log = logging.getLogger(__name__)


async def run(config: VerifierConfig, runner: ServiceRunner | None = None) -> None:
    """Load the target and serve it until the runner stops it. A rank other than 0 computes for rank 0."""
    device, dtype = resolve_placement(config.device, config.dtype, config.model)
    use_threads(config.threads, (device, pass_dtype(config.model, dtype, device, config.engine, config.threads)))
    config = replace(config, device=device, dtype=dtype)
    info = rank_info(config)
    if info.rank > 0:
        await follow_rank_0(config, info)
        return
    workers = gather_ranks(info, config.model, config.dtype, config.engine.max_model_len)
    workers.register_failure_callback(end_in_time)
    try:
        with telemetry(config.telemetry, "verifier") as own:
            await serve_rank_0(config, workers, own, runner or ProcessRunner(config.stuck_step_exit_timeout_s))
    finally:
        workers.close()


async def serve_rank_0(config: VerifierConfig, workers: TargetWorkers, telemetry: Telemetry, runner: ServiceRunner) -> None:
    """Serve with the other ranks ready. Raises Unavailable when one of them ends."""
    peers = Peers(config.peers)
    target = Checkpoint(config.model)
    head = DraftHead(config.draft_model, config.method, target)
    features = "" if config.drafts_itself else head.features_fingerprint()
    target_info = TargetInfo(target_fingerprint(target), features)
    engine, pool = load_engine(config, target, head, target_info, workers, peers)
    model = ModelInfo(
        config.served_model_name,
        target_info.target_fingerprint,
        engine.vocab_size,
        engine.max_model_len,
        target_info.features_fingerprint,
        outputs_fingerprint(config, target_info),
        tuple(sampling_defaults(target, config.generation_config).items()),
    )
    log.info("model %s: vocabulary %d, context %d", model.name, model.vocab_size, model.max_model_len)
    server = worker_server(config.server, peers)
    with closing(pool) if pool else nullcontext():
        observer = VerifierTelemetry(telemetry, model.name, pool, own_method=head.method if config.drafts_itself else "")
        async with AsyncEngine(engine, observer.on_step, config.max_pending_bytes) as async_engine:
            workers.register_failure_callback(async_engine.fail)
            observer.watch(lambda: async_engine.load)
            registry = lease_registry(config.discovery, config.registry, peers)
            discovery = build_discovery(config.discovery, registry, peers)
            feeds = ChunkFeeds(async_engine.unread)
            servicer = GenerationServicer(async_engine, model, pool, observer, partial(discovery.known, "draft"), feeds)
            generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server.aio)
            generation_pb2_grpc.add_ChunkFeedServicer_to_server(feeds, server.aio)
            server.before_stop(feeds.close)
            worker = AnnouncedWorker(
                "verifier",
                model,
                lambda: announced_load(async_engine.load),
                config.server.zone,
                lambda: async_engine.prefix_hashes,
                lambda: pool.status if pool else (),
            )
            registration = WorkerRegistration(server, registry, worker)
            tasks = [
                asyncio.create_task(watch_steps(async_engine, registration, config, workers.fail), name="watchdog"),
                asyncio.create_task(LoadLog(telemetry.registry).run(lambda: async_engine.load), name="load log"),
            ]
            try:
                if pool is not None:
                    await discovery.watch("draft")
                    following = follow_drafters(discovery, model, pool, config.registry.heartbeat_interval_s)
                    tasks.append(asyncio.create_task(following, name="drafters"))
                await serve(server, [GENERATION_SERVICE, WORKER_SERVICE], config.server, registration, runner=runner)
            finally:
                for task in tasks:
                    await cancel_task(task)
                await discovery.close()
        for status in pool.status if pool else ():
            log.info("drafter %s: %d requests answered, %d lost", status.address, status.num_answered, status.num_lost)


def outputs_fingerprint(config: VerifierConfig, target: TargetInfo) -> str:
    """Return the digest of the target and of the settings that decide which tokens it gives. Device and dtype must have been
    resolved.

    Other devices, compiled kernels of the CPU and other numbers of ranks take sums in another order, which decides between
    tokens that are nearly equal.
    """
    engine, device = config.engine, config.device.partition(":")[0]
    is_compiled = runs_compiled(torch.device(device))
    rounds_halves = config.dtype == "bfloat16" and engine.quantization != INT8 and is_compiled
    parts = {
        "target": target.target_fingerprint,
        "dtypes": [config.dtype, pass_dtype(config.model, config.dtype, config.device, engine)],
        "has rows in bfloat16": rounds_halves and multiplies_tiles(),
        "device": device,
        "has compiled products": is_compiled,
        "has rows in 8 bits": engine.quantization == INT8 and adds_products_of_bytes(),
        "engine": engine.output_settings,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load_engine(
    config: VerifierConfig,
    target: Checkpoint,
    head: DraftHead,
    target_info: TargetInfo,
    workers: TargetWorkers,
    peers: Peers,
) -> tuple[Engine, DraftPool | None]:
    """Return the engine, and the pool of its draft services; None for a verifier that takes no drafts, or drafts itself."""
    proposal: Proposal = "sampled" if config.engine.acceptance == "rejection" else "deterministic"
    dtype = pass_dtype(target, config.dtype, config.device, config.engine)
    fuser = head.build_fuser(target, dtype, config.device)
    needs = DrafterNeeds(features=fuser is not None, samples=True)
    takes_drafts = head.drafts and not config.drafts_itself
    pool = DraftPool(config.draft_client, needs, proposal, target_info, peers) if takes_drafts else None
    drafter: Drafter | None = pool
    model = load_model(target, fuser, config.dtype, config.device, config.engine, workers)
    if config.drafts_itself:
        own = DraftHead("", head.method)
        drafter = own.build_drafter(target, dtype, config.device, config.tree, DraftingConfig(), config.methods)
    if fuser is not None and config.validate_head == "auto" and workers.size == 1:
        head.resolve_wiring(model, fuser, target, dtype, config.device)
    tree = head.resolve_tree(config.tree)
    assembled = assemble_engine(model, fuser, config.engine, tree, drafter, workers)
    log.info("loading the tokenizer for structured outputs")
    assembled.load_grammars()
    return assembled, pool


async def watch_steps(
    engine: AsyncEngine, registration: WorkerRegistration, config: VerifierConfig, fail: Callable[[str], object]
) -> None:
    """Report NOT_SERVING and fail all requests while a step takes longer than `stuck_step_timeout_s`.

    The requests move to other verifiers. Once the step has ended, the service is SERVING again.

    fail: called with the reason if it takes longer than `stuck_step_exit_timeout_s`; then nothing more is watched.
    """
    limit_s, is_stuck, seconds = config.stuck_step_timeout_s, False, 0.0
    while seconds <= config.stuck_step_exit_timeout_s:
        await asyncio.sleep(min(limit_s / 4, 1.0))
        seconds = engine.load.step_seconds
        if is_stuck != (seconds > limit_s):
            is_stuck = not is_stuck
            if is_stuck:
                engine.suspend(f"a step has not ended for {seconds:.1f} s")
                log.error(
                    "a step has not ended for %.1f s; the service is NOT_SERVING. It is here:\n%s", seconds, engine.stack
                )
            else:
                engine.resume()
                log.info("the step has ended; the service is SERVING again")
            await registration.set_serving(not is_stuck)
    fail(f"a step has not ended for {seconds:.1f} s; the log says where it is")


async def follow_drafters(discovery: Discovery, model: ModelInfo, pool: DraftPool, interval_s: float) -> None:
    """Give the pool the live drafters for `model`, every `interval_s` seconds until cancelled."""

    async def rebalance() -> None:
        pool.rebalance([lease.address for lease in discovery.known("draft") if model.target.is_drafted_by(lease.model)])

    await repeat(interval_s, rebalance)


def rank_info(config: VerifierConfig, environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the rank of this process. Without RANK it is rank 0 and starts the others itself.

    Raises ConfigError for an environment that is incomplete or does not fit `engine.tensor_parallel_size`.
    """
    size = config.engine.tensor_parallel_size
    if "RANK" not in environment or size == 1:
        return RankInfo(0, size, config.device)
    try:
        rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank, address = int(environment.get("LOCAL_RANK", "0")), environment["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"RANK is set, so WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be too: {error}") from error
    if world != size or not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of WORLD_SIZE {world} does not fit engine.tensor_parallel_size {size}")
    device = f"cuda:{local_rank}" if config.device == "cuda" else config.device
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(rank, size, device, address, port, has_store)


def end_in_time(reason: str) -> None:
    """Have the system end this process soon, in whatever state it is, because another rank is gone or a step hangs."""
    log.critical("this verifier cannot go on; ending within %d s: %s", END_SECONDS, reason)
    signal.alarm(END_SECONDS)


async def follow_rank_0(config: VerifierConfig, info: RankInfo) -> None:
    """Compute for rank 0 until it stops. Health says SERVING once the shard is loaded.

    Signals are ignored: a signal to the whole group stops rank 0, which first finishes its running calls.
    Raises Unavailable when rank 0 is gone.
    """
    server = worker_server(config.server, Peers(config.peers))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, log.info, "rank %d stops when rank 0 does", info.rank)

    def ready() -> None:
        asyncio.run_coroutine_threadsafe(server.set_serving(True), loop)

    address = await server.start(())
    log.info("rank %d of %d; health is served on %s", info.rank, info.size, address)
    try:
        await asyncio.to_thread(run_worker, config.model, config.dtype, config.engine.max_model_len, info, ready)
    finally:
        await server.set_serving(False)
        await server.stop(0)


app = service_app(VerifierConfig, run)

if __name__ == "__main__":
    app()
