"""The draft service: `python -m eyas.services.draft --config FILE --set key=value`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

from eyas.config import DraftConfig, EngineConfig
from eyas.config.file_values import get_setting
from eyas.device.placement import use_threads
from eyas.drafters.base import LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.errors import RequestFailed
from eyas.models.checkpoint import Checkpoint
from eyas.models.fingerprints import target_fingerprint
from eyas.models.placement import pass_dtype, resolve_placement
from eyas.rpc.channel import Peers
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.services.discovery.redis_registry import lease_registry
from eyas.services.draft.servicer import DraftServicer, check_distinct
from eyas.services.draft.telemetry import DraftTelemetry
from eyas.services.draft.worker import DraftWorker
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
from eyas.telemetry.exporters import telemetry
from eyas.v1 import draft_pb2, draft_pb2_grpc

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name

DescribedDrafter = tuple[LocalDrafter, DrafterInfo]


async def run(config: DraftConfig, runner: ServiceRunner | None = None) -> None:
    """Load the drafters and serve them until the runner stops the service."""
    drafters: list[DescribedDrafter] = []
    target_of, info_of = cache(Checkpoint), cache(read_target)
    heads = [DraftHead(model.draft_model, model.method, target_of(model.model)) for model in config.models]
    placements = [resolve_placement(model.device, model.dtype, target_of(model.model)) for model in config.models]
    targets = [target_of(model.model) for model in config.models]

    def passes(threads: int | None) -> list[tuple[str, str]]:
        return [
            (device, pass_dtype(target, dtype, device, EngineConfig(), threads))
            for target, (device, dtype) in zip(targets, placements, strict=True)
        ]

    use_threads(config.threads, *passes(config.threads))
    for model, head, target, (device, dtype) in zip(config.models, heads, targets, passes(None), strict=True):
        drafter = head.build_drafter(target, dtype, device, model.tree, model.drafting, model.methods, has_idle_time=True)
        drafters.append((drafter, describe(model.served_model_name, head, drafter, info_of(target))))
    with telemetry(config.telemetry, "draft") as own:
        runner = runner or ProcessRunner(config.stuck_step_exit_timeout_s)
        await serve_drafters(config, drafters, DraftTelemetry(own), runner)


def read_target(target: Checkpoint) -> ModelInfo:
    """Return the target's fingerprint and sizes, from its config and samples of its weights. Raises CheckpointError."""
    config, sizes = target.text_config, ("vocab_size", "max_position_embeddings")
    vocab_size, longest = (get_setting(int, config, key, target.path) for key in sizes)
    return ModelInfo("", target_fingerprint(target), vocab_size, longest)


def describe(name: str, head: DraftHead, drafter: LocalDrafter, target: ModelInfo) -> DrafterInfo:
    """Return the answer to a verifier's Describe. Raises CheckpointError."""
    return DrafterInfo(
        model=replace(target, name=name, features_fingerprint=head.features_fingerprint()),
        method=head.method,
        needs_features=drafter.needs.features,
        needs_samples=drafter.needs.samples,
        feature_size=drafter.needs.feature_size,
        can_sample=drafter.can_sample,
        has_lookups=drafter.has_lookups,
    )


async def serve_drafters(
    config: DraftConfig,
    drafters: Sequence[DescribedDrafter],
    telemetry: DraftTelemetry | None = None,
    runner: ServiceRunner | None = None,
) -> None:
    """Serve until the runner stops the service. Each drafter has a lease, all with one address and over one connection.

    Raises ConfigError for drafters that fit the same verifiers, RequestFailed when a drafter breaks for good.
    """
    check_distinct([info for _, info in drafters])
    loop, owner = asyncio.get_running_loop(), asyncio.current_task()
    assert owner is not None
    peers = Peers(config.peers)
    server = worker_server(config.server, peers)
    observer = telemetry or DraftTelemetry()

    def end() -> None:
        loop.call_soon_threadsafe(owner.cancel)

    with ExitStack() as stack:
        started = [DraftWorker(drafter, info, end, observer, config.queue) for drafter, info in drafters]
        workers = [stack.enter_context(worker) for worker in started]
        observer.watch(lambda: [worker.load() for worker in workers])
        servicer = DraftServicer(workers)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, server.aio)
        server.before_stop(servicer.close)
        process, zone = uuid.uuid4().hex, config.server.zone
        announced = [
            AnnouncedWorker("draft", worker.info.model, worker.load, zone, incarnation=f"{process}/{number}")
            for number, worker in enumerate(workers)
        ]
        registration = WorkerRegistration(server, lease_registry(config.discovery, config.registry, peers), *announced)
        try:
            await serve(server, [DRAFT_SERVICE, WORKER_SERVICE], config.server, registration, runner=runner)
        except asyncio.CancelledError:
            if not any(worker.broken for worker in workers):
                raise
            owner.uncancel()
            raise RequestFailed("the drafter broke; the log has the traceback") from None


app = service_app(DraftConfig, run)

if __name__ == "__main__":
    app()
