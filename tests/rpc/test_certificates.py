"""Services of one deployment know one another by their certificates, and go on when these are renewed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.client import Connection
from eyas.config import (
    DiscoveryConfig,
    DiscoveryKind,
    DraftClientConfig,
    DraftConfig,
    PeersConfig,
    RegistryConfig,
    RouterConfig,
    ServedModel,
    ServerConfig,
    VerifierConfig,
)
from eyas.drafters.base import DrafterNeeds
from eyas.errors import ConfigError
from eyas.protocol.tree import DraftTree
from eyas.rpc.channel import Peers
from eyas.rpc.messages import Load
from eyas.rpc.server import RpcServer
from eyas.services.discovery.probing import build_discovery
from eyas.services.discovery.redis_registry import Registry
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.local.cluster import free_port
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.verifier.draft_client import RemoteDrafter
from tests.support.services.authority import Authority, peers
from tests.support.services.faulty_proxy import Proxy, registered_behind_proxy
from tests.support.services.toy_drafting import INFO, ToyDrafter, context, eventually
from tests.support.services.toy_drafting import serving as serving_drafts


@asynccontextmanager
async def serving(config: PeersConfig) -> AsyncIterator[str]:
    server = RpcServer(ServerConfig(), credentials=Peers(config).server_credentials)
    address = await server.start([])
    await server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(0)


async def reaches(dialler: Peers, address: str) -> bool:
    async with dialler.open_channel(address) as channel:
        return await answers(channel)


async def answers(channel: grpc.aio.Channel) -> bool:
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code is grpc.StatusCode.OK


async def test_peers_are_authenticated_by_issuer_and_name(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    ours.write(tmp_path / "worker")
    ours.write(tmp_path / "router", "router.eyas")
    theirs.write(tmp_path / "stranger")
    router, stranger = peers(tmp_path / "router"), peers(tmp_path / "stranger")
    trusting = replace(stranger, ca_file=str(tmp_path / "router" / "ca.crt"))
    async with serving(peers(tmp_path / "worker")) as address:
        assert await reaches(Peers(router), address)
        assert not await reaches(Peers(), address), "without TLS"
        assert not await reaches(
            Peers(PeersConfig(ca_file=router.ca_file, tls_server_name=router.tls_server_name)), address
        ), "no name"
        assert not await reaches(Peers(trusting), address), "signed by another"
        assert not await reaches(Peers(stranger), address), "the worker is signed by another"
        assert not await reaches(Peers(replace(router, tls_server_name="elsewhere")), address)
        assert not await reaches(Peers(replace(router, tls_server_name="")), address), "the certificate is for no address"
    async with serving(peers(tmp_path / "worker", require_client_cert=False)) as address:
        assert await reaches(Peers(PeersConfig(ca_file=router.ca_file, tls_server_name=router.tls_server_name)), address)
        assert not await reaches(Peers(stranger), address)


async def test_renewed_certificates_apply_to_new_connections(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    old.write(tmp_path)
    old_authority = tmp_path / "old.crt"
    old_authority.write_bytes(old.pem)
    dialler = Peers(peers(tmp_path))
    async with serving(peers(tmp_path)) as address, dialler.open_channel(address) as kept:
        assert await answers(kept)
        identity = dialler.identity
        (tmp_path / "tls.key").write_text("half of a renewal")
        assert dialler.identity is identity
        assert await reaches(dialler, address), "files that do not fit are left alone"
        new.write(tmp_path)
        assert dialler.identity is not identity
        assert await reaches(dialler, address), "both by the new authority"
        assert await answers(kept), "a connection outlives the certificate that it was made with"
        assert not await reaches(Peers(PeersConfig(ca_file=str(old_authority), tls_server_name="workers.eyas")), address)


def test_a_returning_drafter_is_dialled_with_new_certificates(tmp_path: Path) -> None:
    Authority("old").write(tmp_path)
    port, config = free_port(), DraftClientConfig(draft_timeout_s=20.0)
    needs, ours = DrafterNeeds(features=True), Peers(peers(tmp_path))
    with closing(RemoteDrafter(f"127.0.0.1:{port}", needs, config, peers=ours)) as remote:
        with serving_drafts(ToyDrafter(), port=port, peers=Peers(peers(tmp_path))):
            eventually(lambda: remote.connected)
        eventually(lambda: not remote.connected)
        Authority("new").write(tmp_path)
        with serving_drafts(ToyDrafter(), port=port, peers=Peers(peers(tmp_path))):
            eventually(lambda: remote.connected, 60)
            assert remote.request([context("a", range(10, 15))])() == [DraftTree.chain([14, 15, 16, 17])]


@pytest.mark.parametrize("kind", ["redis", "static"])
async def test_a_lost_verifier_is_dialled_with_renewed_certificates(kind: DiscoveryKind, url: str, tmp_path: Path) -> None:
    """To ask it, and to probe it where there are no leases."""
    Authority("old").write(tmp_path)
    leases = Registry(RegistryConfig(url, 60.0, 0.05)) if kind == "redis" else None
    ours = Peers(peers(tmp_path, keepalive_interval_s=0.1, keepalive_timeout_s=1.0))
    async with verifier_behind(Peers(peers(tmp_path)), leases) as proxy:
        named = (proxy.address,) if kind == "static" else ()
        discovery = build_discovery(DiscoveryConfig(kind, named, probe_interval_s=0.05), leases, ours)
        workers = WorkerPool(discovery, RouterConfig(()), ours)
        await discovery.watch("verifier")
        try:
            await refreshed(workers, lambda: bool(workers.reachable))
            Authority("new").write(tmp_path)
            proxy.partitioned = True
            await refreshed(workers, lambda: not workers.reachable)
            proxy.partitioned = False
            await refreshed(workers, lambda: bool(workers.reachable))
        finally:
            await workers.close()
            await discovery.close()


@asynccontextmanager
async def verifier_behind(theirs: Peers, leases: Registry | None) -> AsyncIterator[Proxy]:
    """A verifier behind a proxy, found by probing or by a lease with the proxy's address."""
    server = RpcServer(ServerConfig(), credentials=theirs.server_credentials)
    registration = WorkerRegistration(server, leases, AnnouncedWorker("verifier", INFO.model, lambda: Load(0, 0, 10_000)))
    async with registered_behind_proxy(server, registration) as proxy:
        yield proxy


async def refreshed(workers: WorkerPool, condition: Callable[[], bool]) -> None:
    """Look again and again, as a router does, until the condition holds."""
    async with asyncio.timeout(60):
        await workers.refresh()
        while not condition():
            await asyncio.sleep(0.02)
            await workers.refresh()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_file": ""}, "cert_file and key_file go together"),
        ({"ca_file": "", "tls_server_name": ""}, "cert_file is set; set ca_file too"),
        ({"cert_file": "", "key_file": "", "ca_file": ""}, "tls_server_name is set; set ca_file too"),
        ({"keepalive_interval_s": 0.0}, "keepalive_interval_s is 0.0; it must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        peers(tmp_path, **changes)


def test_files_that_cannot_be_used_are_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"peers\.cert_file, peers\.key_file and peers\.ca_file cannot be used: .*tls\.crt"
    ):
        Peers(peers(tmp_path))
    Authority().write(tmp_path)
    one_key = (tmp_path / "tls.key").read_bytes()
    Authority().write(tmp_path)
    (tmp_path / "tls.key").write_bytes(one_key)
    with pytest.raises(ConfigError, match=r"KEY_VALUES_MISMATCH|key values mismatch"):
        Peers(peers(tmp_path))


def test_an_encrypted_key_is_an_error_without_a_password_prompt(tmp_path: Path) -> None:
    Authority().write(tmp_path)
    key = serialization.load_pem_private_key((tmp_path / "tls.key").read_bytes(), None)
    secret, form = serialization.BestAvailableEncryption(b"secret"), serialization.PrivateFormat.PKCS8
    (tmp_path / "tls.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    with pytest.raises(ConfigError, match=r"tls\.key is encrypted; give the key without a password"):
        Peers(peers(tmp_path))


def test_api_keys_are_masked_in_the_printed_config(tmp_path: Path) -> None:
    Authority().write(tmp_path)
    assert "PRIVATE KEY" in str(Peers(peers(tmp_path)).identity.key)
    assert "PRIVATE KEY" not in repr(Peers(peers(tmp_path)).identity)
    assert "secret" not in repr(Connection("router:50050", "secret"))


@pytest.mark.parametrize("kind", [VerifierConfig, DraftConfig])
def test_no_worker_dials_with_tls_and_is_dialled_without(kind: type[VerifierConfig | DraftConfig]) -> None:
    with pytest.raises(ConfigError, match=r"this worker would serve without TLS; set peers\.cert_file and peers\.key_file"):
        kind("demo", "target", draft_model="head", peers=PeersConfig(ca_file="ca.crt"))
    assert RouterConfig((ServedModel("demo", "target"),), peers=PeersConfig(ca_file="ca.crt"))
