"""The verifier service: `python -m services.verifier --config FILE --set key=value`."""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext

import torch

from eyas.commit import Proposal
from eyas.config import VerifierConfig
from eyas.drafters.base import DrafterNeeds
from eyas.engine.build import build_engine, gather_ranks
from eyas.models.checkpoint import head_fingerprint, target_fingerprint
from eyas.models.parallel.ranks import Ranks
from eyas.rpc.messages import Lease, ModelInfo
from eyas.rpc.server import RpcServer
from eyas.v1 import generation_pb2, generation_pb2_grpc
from services.discovery.base import Discovery
from services.discovery.build import build_discovery, lease_registry
from services.lifecycle import WORKER_SERVICE, Presence, WorkerPresence, main, serve
from services.verifier.loop import EngineLoop
from services.verifier.pool import DraftPool
from services.verifier.presence import VerifierPresence
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
    ranks = gather_ranks(place, config.target, config.dtype, config.engine.context_length)
    ranks.watch(end_in_time)
    try:
        await lead(config, ranks)
    finally:
        ranks.close()


async def lead(config: VerifierConfig, ranks: Ranks) -> None:
    """Serve as rank 0, with the others ready. Raises Unavailable when one of them is gone."""
    proposal: Proposal = "sampled" if config.engine.rule == "rejection" else "deterministic"
    pool = DraftPool(config.link, DrafterNeeds(features=True), proposal) if config.head else None
    engine = build_engine(config.target, config.head, config.dtype, config.device, config.engine, config.tree, pool, ranks)
    head = head_fingerprint(config.head) if config.head else ""
    model = ModelInfo(config.model, target_fingerprint(config.target), engine.vocab_size, engine.context_length, head)
    log.info("model %s: vocabulary %d, context %d", model.name, model.vocab_size, model.context_length)
    server = RpcServer(config.server)
    with closing(pool) if pool else nullcontext():
        async with EngineLoop(engine) as loop:
            ranks.watch(loop.lose)
            generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(loop, model, pool), server.aio)
            registry, zone = lease_registry(config.discovery, config.registry), config.server.zone
            worker = WorkerPresence(server, registry, "verifier", model, lambda: loop.load, zone, lambda: loop.prefixes)
            discovery = build_discovery(config.discovery, registry)
            presence = _following(worker, discovery, model, pool, config.registry.heartbeat) if pool else worker
            names = [generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name, WORKER_SERVICE]
            await serve(server, names, config.server, presence)
        for stats in pool.stats if pool else ():
            log.info("drafter %s", stats)


def _following(worker: Presence, discovery: Discovery, model: ModelInfo, pool: DraftPool, interval: float) -> Presence:
    """Sessions get and change their drafters as drafters come and go."""

    def follow(drafters: tuple[Lease, ...]) -> None:
        pool.rehome([lease.address for lease in drafters if model.is_drafted_by(lease.model)])

    return VerifierPresence(worker, discovery, follow, interval)


if __name__ == "__main__":
    main(VerifierConfig, run)
