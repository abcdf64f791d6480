"""The draft service: `python -m services.draft --config FILE --set key=value`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.config import DraftConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.build import build_drafter
from eyas.models.checkpoint import head_fingerprint, read_config, resolve, target_fingerprint
from eyas.models.heads.config import head_config
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.rpc.server import RpcServer
from eyas.v1 import draft_pb2, draft_pb2_grpc
from services.draft.servicer import DraftServicer
from services.draft.worker import DraftWorker
from services.lifecycle import Presence, WorkerPresence, main, serve
from services.registry import Load, Registry


async def run(config: DraftConfig) -> None:
    """Load the drafter and serve it until told to stop."""
    if config.threads:
        torch.set_num_threads(config.threads)
    drafter = build_drafter(
        config.drafter, config.target, config.head, config.dtype, config.device, config.tree, config.eagle
    )
    info = describe(config, drafter)
    server = RpcServer(config.server)
    with DraftWorker(drafter, info) as worker:
        servicer = DraftServicer(worker, info)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, server.aio)
        lease = WorkerPresence(server, Registry(config.registry), "draft", info.model, lambda: _load(worker))
        names = [draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name]
        await serve(server, names, config.server, _DraftPresence(lease, servicer))


def describe(config: DraftConfig, drafter: LocalDrafter) -> DrafterInfo:
    """What verifiers are told. Raises CheckpointError."""
    target = read_config(resolve(config.target))
    needs = drafter.needs
    return DrafterInfo(
        model=ModelInfo(
            name=config.model,
            fingerprint=target_fingerprint(config.target),
            vocab_size=int(target["vocab_size"]),
            context_length=int(target["max_position_embeddings"]),
            head_fingerprint=head_fingerprint(config.head) if needs.features else "",
        ),
        drafter=config.drafter,
        needs_features=needs.features,
        needs_samples=needs.samples,
        feature_size=head_config(resolve(config.head), target).hidden if needs.features else 0,
        can_sample=drafter.can_sample,
    )


@dataclass(frozen=True)
class _DraftPresence:
    """A lease, and streams that end with it: they would outlast any grace."""

    lease: Presence
    servicer: DraftServicer

    async def enter(self, address: str) -> None:
        await self.lease.enter(address)

    async def leave(self) -> None:
        await self.lease.leave()
        await self.servicer.close()


def _load(worker: DraftWorker) -> Load:
    return Load(num_running=worker.num_sessions, num_waiting=worker.num_waiting)


if __name__ == "__main__":
    main(DraftConfig, run)
