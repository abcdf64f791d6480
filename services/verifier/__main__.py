"""The verifier service: `python -m services.verifier --config FILE --set key=value`."""

from __future__ import annotations

import asyncio
import logging

import torch

from eyas.config import VerifierConfig
from eyas.drafters.base import DrafterNeeds
from eyas.engine.build import build_engine, gather_ranks
from eyas.models.checkpoint import head_fingerprint, target_fingerprint
from eyas.models.parallel.ranks import Ranks
from eyas.rpc.messages import ModelInfo
from eyas.rpc.server import RpcServer
from eyas.v1 import generation_pb2, generation_pb2_grpc
from services.lifecycle import WorkerPresence, main, serve
from services.registry import Registry
from services.verifier.loop import EngineLoop
from services.verifier.pool import DraftPool
from services.verifier.ranks import end_in_time, follow_rank_0, place_of
from services.verifier.servicer import GenerationServicer

log = logging.getLogger(__name__)


async def run(config: VerifierConfig) -> None:
    """Load the target and serve it until told to stop; a rank other than 0 does its part for rank 0."""
    if config.threads:
        torch.set_num_threads(config.threads)
    place = place_of(config)
    if place.rank > 0:
        await follow_rank_0(config, place)
        return
    ranks = gather_ranks(place, config.target, config.dtype)
    ranks.watch(end_in_time)
    try:
        await lead(config, ranks)
    finally:
        ranks.close()


async def lead(config: VerifierConfig, ranks: Ranks) -> None:
    """Serve as rank 0, with the others ready. Raises Unavailable when one of them is gone."""
    pool = DraftPool(config.link, DrafterNeeds(features=True)) if config.head else None
    engine = build_engine(config.target, config.head, config.dtype, config.device, config.engine, config.tree, pool, ranks)
    head = head_fingerprint(config.head) if config.head else ""
    model = ModelInfo(config.model, target_fingerprint(config.target), engine.vocab_size, engine.context_length, head)
    log.info("model %s: vocabulary %d, context %d", model.name, model.vocab_size, model.context_length)
    server = RpcServer(config.server)
    async with EngineLoop(engine) as loop:
        ranks.watch(loop.lose)
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(loop, model, pool), server.aio)
        registry = Registry(config.registry)
        presence = WorkerPresence(server, registry, "verifier", model, lambda: loop.load)
        names = [generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name]
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(_follow(registry, model, pool, config.registry.heartbeat)) if pool else None
            await serve(server, names, config.server, presence)
            if following:
                following.cancel()
    if pool:
        for stats in pool.stats:
            log.info("drafter %s", stats)
        pool.close()


async def _follow(registry: Registry, model: ModelInfo, pool: DraftPool, seconds: float) -> None:
    """Move sessions away from drafters that are gone, as the registry learns of it."""
    await registry.watch("draft")
    while True:
        await asyncio.sleep(seconds)
        pool.rehome([lease.address for lease in registry.known("draft") if model.is_drafted_by(lease.model)])


if __name__ == "__main__":
    main(VerifierConfig, run)
