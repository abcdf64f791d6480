"""The verifier service: `python -m eyas.services.verifier --config FILE --set key=value`."""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext

import torch

from eyas.config import VerifierConfig
from eyas.draft_protocol import Proposal
from eyas.drafters.base import DrafterNeeds
from eyas.drafters.registry import NO_DRAFTS, build_fuser, default_drafter, features_fingerprint, resolve_wiring
from eyas.engine.build import assemble_engine, gather_ranks, load_model
from eyas.models.checkpoint import resolve_placement, target_fingerprint
from eyas.models.workers import TargetWorkers
from eyas.rpc.channel import Peers
from eyas.rpc.messages import Lease, ModelInfo, TargetInfo
from eyas.rpc.server import RpcServer
from eyas.services.discovery.base import Discovery
from eyas.services.discovery.build import build_discovery, lease_registry
from eyas.services.lifecycle import (
    PROCESS,
    WORKER_SERVICE,
    Registration,
    ServiceRunner,
    WorkerRegistration,
    serve,
    service_app,
)
from eyas.services.verifier.async_engine import AsyncEngine
from eyas.services.verifier.draft_pool import DraftPool
from eyas.services.verifier.ranks import VerifierRegistration, end_in_time, follow_rank_0, place_of
from eyas.services.verifier.servicer import GenerationServicer
from eyas.services.verifier.telemetry import VerifierTelemetry
from eyas.telemetry.setup import Telemetry, telemetry
from eyas.v1 import generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)


async def run(config: VerifierConfig, host: ServiceRunner = PROCESS) -> None:
    """Load the target and serve it until told to stop; a rank other than 0 does its part for rank 0."""
    if config.threads:
        torch.set_num_threads(config.threads)
    config = resolve_placement(config, config.model)
    place = place_of(config)
    if place.rank > 0:
        await follow_rank_0(config, place)
        return
    ranks = gather_ranks(place, config.model, config.dtype, config.engine.max_model_len)
    ranks.register_failure_callback(end_in_time)
    try:
        with telemetry(config.telemetry, "verifier") as own:
            await lead(config, ranks, own, host)
    finally:
        ranks.close()


async def lead(config: VerifierConfig, ranks: TargetWorkers, telemetry: Telemetry, host: ServiceRunner) -> None:
    """Serve as rank 0, with the others ready. Raises Unavailable when one of them is gone."""
    proposal: Proposal = "sampled" if config.engine.acceptance == "rejection" else "deterministic"
    drafter = default_drafter(config.method, config.draft_model)
    fuser = build_fuser(drafter, config.draft_model, config.model, config.dtype, config.device)
    needs = DrafterNeeds(features=fuser is not None, samples=True)
    verified = TargetInfo(target_fingerprint(config.model), features_fingerprint(drafter, config.draft_model))
    peers = Peers(config.peers)
    pool = DraftPool(config.draft_client, needs, proposal, verified, peers) if drafter != NO_DRAFTS else None
    target = load_model(config.model, fuser, config.dtype, config.device, config.engine, ranks)
    if fuser is not None and config.validate_head == "auto" and ranks.size == 1:
        resolve_wiring(drafter, target, fuser, config.draft_model, config.model, config.dtype, config.device)
    engine = assemble_engine(target, fuser, config.engine, config.tree, pool, ranks)
    model = ModelInfo(
        config.served_model_name,
        verified.target_fingerprint,
        engine.vocab_size,
        engine.max_model_len,
        verified.features_fingerprint,
    )
    log.info("model %s: vocabulary %d, context %d", model.name, model.vocab_size, model.max_model_len)
    server = RpcServer(config.server, credentials=peers.server_credentials)
    with closing(pool) if pool else nullcontext():
        observer = VerifierTelemetry(telemetry, model.name, pool)
        async with AsyncEngine(engine, observer.stepped) as loop:
            ranks.register_failure_callback(loop.lose)
            observer.watch(lambda: loop.engine_load)
            servicer = GenerationServicer(loop, model, pool, observer)
            generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server.aio)
            registry, zone = lease_registry(config.discovery, config.registry), config.server.zone
            worker = WorkerRegistration(server, registry, "verifier", model, lambda: loop.load, zone, lambda: loop.prefixes)
            discovery = build_discovery(config.discovery, registry, peers)
            presence = _following(worker, discovery, model, pool, config.registry.heartbeat_interval_s) if pool else worker
            names = [generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name, WORKER_SERVICE]
            await serve(server, names, config.server, presence, host=host)
        for stats in pool.stats if pool else ():
            log.info("drafter %s", stats)


def _following(
    worker: Registration, discovery: Discovery, model: ModelInfo, pool: DraftPool, interval: float
) -> Registration:
    """Sessions get and change their drafters as drafters come and go."""

    def follow(drafters: tuple[Lease, ...]) -> None:
        pool.rehome([lease.address for lease in drafters if model.is_drafted_by(lease.model)])

    return VerifierRegistration(worker, discovery, follow, interval)


app = service_app(VerifierConfig, run)

if __name__ == "__main__":
    app()
