"""The draft service: `python -m services.draft --config FILE --set key=value`."""

from __future__ import annotations

import asyncio

import torch

from eyas.config import DraftConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.build import build_drafter, features_digest
from eyas.errors import RequestFailed
from eyas.models.checkpoint import read_target_config, resolve, target_fingerprint
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.rpc.server import RpcServer
from eyas.v1 import draft_pb2, draft_pb2_grpc
from services.draft.servicer import DraftServicer
from services.draft.worker import DraftWorker
from services.lifecycle import WorkerPresence, main, serve
from services.registry import Load, Registry


async def run(config: DraftConfig) -> None:
    """Load the drafter and serve it until told to stop."""
    if config.threads:
        torch.set_num_threads(config.threads)
    drafter = build_drafter(
        config.drafter, config.target, config.head, config.dtype, config.device, config.tree, config.eagle, config.methods
    )
    info = describe(config, drafter)
    await serve_drafter(config, drafter, info)


async def serve_drafter(config: DraftConfig, drafter: LocalDrafter, info: DrafterInfo) -> None:
    """Serve until told to stop. Raises RequestFailed when the drafter breaks for good."""
    loop, owner = asyncio.get_running_loop(), asyncio.current_task()
    assert owner is not None
    server = RpcServer(config.server)
    with DraftWorker(drafter, info, lambda: loop.call_soon_threadsafe(owner.cancel)) as worker:
        servicer = DraftServicer(worker, info)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, server.aio)
        server.before_stop(servicer.close)
        presence = WorkerPresence(server, Registry(config.registry), "draft", info.model, lambda: _load(worker))
        names = [draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name]
        try:
            await serve(server, names, config.server, presence)
        except asyncio.CancelledError:
            if not worker.broken:
                raise
            owner.uncancel()
            raise RequestFailed("the drafter broke; the log has the traceback") from None


def describe(config: DraftConfig, drafter: LocalDrafter) -> DrafterInfo:
    """What verifiers are told. Raises CheckpointError."""
    target = read_target_config(resolve(config.target))
    needs = drafter.needs
    return DrafterInfo(
        model=ModelInfo(
            name=config.model,
            fingerprint=target_fingerprint(config.target),
            vocab_size=int(target["vocab_size"]),
            context_length=int(target["max_position_embeddings"]),
            head_fingerprint=features_digest(config.drafter, config.head),
        ),
        drafter=config.drafter,
        needs_features=needs.features,
        needs_samples=needs.samples,
        feature_size=needs.feature_size,
        can_sample=drafter.can_sample,
    )


def _load(worker: DraftWorker) -> Load:
    return Load(num_running=worker.num_sessions, num_waiting=worker.num_waiting)


if __name__ == "__main__":
    main(DraftConfig, run)
