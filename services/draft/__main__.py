"""The draft service: `python -m eyas.services.draft --config FILE --set key=value`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial

import torch

from eyas.config import DraftConfig, DraftedModel
from eyas.drafters.base import LocalDrafter
from eyas.drafters.registry import build_drafter, features_fingerprint
from eyas.errors import RequestFailed
from eyas.models.checkpoint import read_target_config, resolve, resolve_placement, target_fingerprint
from eyas.rpc.channel import Peers
from eyas.rpc.messages import DrafterInfo, Load, ModelInfo
from eyas.rpc.server import RpcServer
from eyas.services.discovery.build import lease_registry
from eyas.services.draft.servicer import DraftServicer
from eyas.services.draft.telemetry import DraftTelemetry
from eyas.services.draft.worker import DraftWorker, check_distinct
from eyas.services.lifecycle import PROCESS, WORKER_SERVICE, ServiceRunner, WorkerRegistration, serve, service_app
from eyas.telemetry.setup import telemetry
from eyas.v1 import draft_pb2, draft_pb2_grpc


@dataclass(frozen=True)
class Served:
    """A drafter and what verifiers are told of it."""

    drafter: LocalDrafter
    info: DrafterInfo


@dataclass(frozen=True)
class Target:
    """What a draft service says of the target that it drafts for."""

    fingerprint: str
    vocab_size: int
    context_length: int


def read_target(path_or_id: str) -> Target:
    """Reads the target's config, and samples of its weights. Raises CheckpointError."""
    config = read_target_config(resolve(path_or_id))
    return Target(target_fingerprint(path_or_id), int(config["vocab_size"]), int(config["max_position_embeddings"]))


async def run(config: DraftConfig, host: ServiceRunner = PROCESS) -> None:
    """Load the drafters and serve them until told to stop."""
    if config.threads:
        torch.set_num_threads(config.threads)
    served, read_once = [], cache(read_target)
    for model in (resolve_placement(drafted, drafted.model) for drafted in config.drafted):
        drafter = build_drafter(
            model.method,
            model.model,
            model.draft_model,
            model.dtype,
            model.device,
            model.tree,
            model.drafting,
            model.methods,
        )
        served.append(Served(drafter, describe(model, drafter, read_once(model.model))))
    with telemetry(config.telemetry, "draft") as own:
        await serve_drafters(config, served, DraftTelemetry(own), host)


async def serve_drafters(
    config: DraftConfig, served: Sequence[Served], telemetry: DraftTelemetry | None = None, host: ServiceRunner = PROCESS
) -> None:
    """Serve until told to stop. Raises ConfigError for drafters that cannot be told apart, RequestFailed when one breaks for
    good."""
    check_distinct([each.info for each in served])
    loop, owner = asyncio.get_running_loop(), asyncio.current_task()
    assert owner is not None
    server = RpcServer(config.server, credentials=Peers(config.peers).server_credentials)
    observer = telemetry or DraftTelemetry()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                DraftWorker(each.drafter, each.info, lambda: loop.call_soon_threadsafe(owner.cancel), observer)
            )
            for each in served
        ]
        observer.watch(
            lambda: sum(worker.num_sessions for worker in workers), lambda: sum(worker.num_waiting for worker in workers)
        )
        servicer = DraftServicer(workers)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, server.aio)
        server.before_stop(servicer.close)
        names = [draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name, WORKER_SERVICE]
        presence = _presence(config, server, workers)
        try:
            await serve(server, names, config.server, presence, host=host)
        except asyncio.CancelledError:
            if not any(worker.broken for worker in workers):
                raise
            owner.uncancel()
            raise RequestFailed("the drafter broke; the log has the traceback") from None


def _presence(config: DraftConfig, server: RpcServer, workers: Sequence[DraftWorker]) -> WorkerRegistration:
    """Of the first worker, beside which the others are present: a lease each, on one address and over one connection."""
    registry, zone, process = lease_registry(config.discovery, config.registry), config.server.zone, uuid.uuid4().hex
    first: WorkerRegistration | None = None
    for number, worker in enumerate(workers):
        found = WorkerRegistration(
            *(server, registry, "draft", worker.info.model, partial(_load, worker), zone),
            incarnation=f"{process}/{number}",
            beside=first,
        )
        first = first or found
    assert first is not None, "a service has a drafter"
    return first


def describe(model: DraftedModel, drafter: LocalDrafter, target: Target) -> DrafterInfo:
    """What verifiers are told. Raises CheckpointError."""
    needs = drafter.needs
    return DrafterInfo(
        model=ModelInfo(
            name=model.served_model_name,
            fingerprint=target.fingerprint,
            vocab_size=target.vocab_size,
            max_model_len=target.context_length,
            features_fingerprint=features_fingerprint(model.method, model.draft_model),
        ),
        method=model.method,
        needs_features=needs.features,
        needs_samples=needs.samples,
        feature_size=needs.feature_size,
        can_sample=drafter.can_sample,
    )


def _load(worker: DraftWorker) -> Load:
    return Load(num_running=worker.num_sessions, num_waiting=worker.num_waiting)


app = service_app(DraftConfig, run)

if __name__ == "__main__":
    app()
