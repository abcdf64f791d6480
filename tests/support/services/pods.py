"""Workers as they live in pods: no registry, an address, an incarnation. Also a router that finds them in other ways."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from eyas.config import DiscoveryConfig, KubernetesConfig, OutlierDetectionConfig, RouterConfig, ServerConfig
from eyas.rpc.channel import Peers
from eyas.rpc.convert import lease_to_proto
from eyas.rpc.messages import Lease, Load, ModelInfo, Role
from eyas.rpc.server import RpcServer
from eyas.services.discovery.base import Discovery
from eyas.services.discovery.probing import build_discovery
from eyas.services.router.auth.keys import ApiKeys
from eyas.services.router.dispatch.dispatcher import Dispatcher, SessionMap
from eyas.services.router.dispatch.generation import GenerationService
from eyas.services.router.dispatch.readiness import ReadinessMonitor
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.grpc_server import RouterServicer
from eyas.services.router.models import RouterModel
from eyas.services.router.telemetry import RouterTelemetry
from eyas.text.tokenizer import load_tokenizer
from eyas.v1 import worker_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from eyas.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tests.support.services.api_server import NAMESPACE, ApiServer
from tests.support.services.scripted_verifier import DEMO, MODEL, RETRY, TOKENS, Script, ScriptedVerifier


@dataclass
class Worker(WorkerServicer):
    """A scripted worker. gate: what its answers about its state wait for, while its health stays SERVING."""

    script: Script
    lease: Lease
    server: RpcServer
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:  # noqa: N802
        self.num_asked += 1
        await self.gate.wait()
        return lease_to_proto(self.lease)

    @property
    def address(self) -> str:
        return self.lease.address

    @property
    def incarnation(self) -> str:
        return self.lease.incarnation


@asynccontextmanager
async def pod_worker(
    script: Script | None = None, role: Role = "verifier", model: ModelInfo = MODEL, port: int = 0, zone: str = ""
) -> AsyncIterator[Worker]:
    """A worker that ends as a killed process does: without a word."""
    server, script = RpcServer(ServerConfig(port=port)), script or Script(TOKENS)
    load = Load(1, 2, 3000, 32)
    worker = Worker(script, Lease(role, "", uuid.uuid4().hex, model, load, zone, frozenset({5, 7})), server)
    worker.gate.set()
    add_GenerationServicer_to_server(ScriptedVerifier(script), server.aio)
    add_WorkerServicer_to_server(worker, server.aio)
    worker.lease = replace(worker.lease, address=await server.start([]))
    await server.set_serving(True)
    try:
        yield worker
    finally:
        await server.aio.stop(0)


def kubernetes(server: ApiServer, resync_interval_s: float = 60.0) -> DiscoveryConfig:
    """Discovery by that API server."""
    return settings("kubernetes", kubernetes=KubernetesConfig(server.url, NAMESPACE, resync_interval_s=resync_interval_s))


def settings(kind: str, **changes: Any) -> DiscoveryConfig:
    """Discovery settings that make haste, and drop no worker for the slow answers of a busy machine."""
    changes = {"probe_interval_s": 0.02, "probe_timeout_s": 0.2, "stale_after_s": 600.0} | changes
    return DiscoveryConfig(kind, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def discovering(config: DiscoveryConfig, *roles: Role) -> AsyncIterator[Discovery]:
    """Live workers of these roles, verifiers if none is named."""
    discovery = build_discovery(config, None)
    await discovery.watch(*(roles or ("verifier",)))
    try:
        yield discovery
    finally:
        await discovery.close()


@asynccontextmanager
async def pod_router(
    config: DiscoveryConfig, outlier_detection: OutlierDetectionConfig | None = None
) -> AsyncIterator[tuple[str, WorkerPool]]:
    """A real router without a registry; gives its address and its workers."""
    server, discovery = RpcServer(ServerConfig()), build_discovery(config, None)
    workers = WorkerPool(
        discovery, RouterConfig((), outlier_detection=outlier_detection or OutlierDetectionConfig()), Peers()
    )
    telemetry = RouterTelemetry()
    dispatcher = Dispatcher(workers, SessionMap(None), 20.0, telemetry, RETRY)
    service = GenerationService([RouterModel("demo", load_tokenizer(DEMO))], workers, dispatcher, 30.0, telemetry)
    add_GenerationServicer_to_server(RouterServicer(service, ApiKeys()), server.aio)
    readiness = ReadinessMonitor(server.set_serving, discovery, workers, 0.02)
    address = await server.start(["eyas.v1.Generation"])
    await readiness.register(address)
    try:
        yield address, workers
    finally:
        await readiness.deregister()
        await server.stop(0)
        await workers.close()
        await discovery.close()


def names(discovery: Discovery, role: Role = "verifier") -> set[str]:
    """The incarnations that are live."""
    return {lease.incarnation for lease in discovery.known(role)}
