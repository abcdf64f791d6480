"""One draft service for several targets and heads: every verifier gets the drafter that fits it, and no other."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.config import (
    DiscoveryConfig,
    DraftConfig,
    DraftedModel,
    DraftingConfig,
    RegistryConfig,
    RoutingConfig,
    ServerConfig,
    TreeConfig,
    load,
)
from eyas.drafters.base import DrafterNeeds
from eyas.drafters.draft_head import DraftHead
from eyas.errors import ConfigError
from eyas.models.checkpoint import Checkpoint
from eyas.models.fingerprints import target_fingerprint
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.convert import target_info_to_proto
from eyas.rpc.messages import DrafterInfo, Lease, Load, ModelInfo, TargetInfo
from eyas.rpc.status import status_error
from eyas.services.discovery.redis_registry import Registry
from eyas.services.draft import servicer
from eyas.services.draft.__main__ import describe, read_target, serve_drafters
from eyas.services.draft.servicer import check_distinct
from eyas.services.local.cluster import free_port
from eyas.services.router.dispatch.routing import RoutingRequest, WorkerSnapshot, pick
from eyas.services.verifier.draft_client import RemoteDrafter
from eyas.v1 import draft_pb2, draft_pb2_grpc
from tests.support.runs import assert_plain, run, stats_of
from tests.support.services.pods import discovering, settings
from tests.support.services.scripted_verifier import until
from tests.support.services.toy_drafting import INFO, PATIENT, ToyDrafter, eventually, serving, serving_all
from tests.support.tiny import build_engine, fixed_config, write_head, write_target

TREE = TreeConfig(8, 3, 3)
EAGLE = DraftingConfig(max_kv_tokens=256)
SAMPLING = SamplingParams(20, 0.0, seed=1, ignore_eos=True)


@dataclass(frozen=True)
class Zoo:
    """Two targets with a head each; the second target is also a draft model for itself."""

    one: str
    other: str
    one_head: str
    other_head: str

    @property
    def models(self) -> tuple[DraftedModel, ...]:
        return (
            DraftedModel("one", self.one, self.one_head, "eagle3", tree=TREE, drafting=EAGLE),
            DraftedModel("other", self.other, self.other_head, "eagle3", tree=TREE, drafting=EAGLE),
            DraftedModel("other", self.other, self.other, "sps", tree=TREE, drafting=EAGLE),
        )


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    root = tmp_path_factory.mktemp("zoo")
    return Zoo(
        str(write_target(root / "one", seed=1)),
        str(write_target(root / "other", vocab_size=60, seed=2)),
        str(write_head(root / "one_head", seed=1)),
        str(write_head(root / "other_head", vocab_size=60, seed=2)),
    )


@pytest.fixture(scope="module")
def address(zoo: Zoo) -> Iterator[str]:
    """A draft service with all drafters of the zoo."""
    built = []
    for model in zoo.models:
        head = DraftHead(model.draft_model, model.method)
        drafter = head.build_drafter(model.model, "float32", "cpu", model.tree, model.drafting)
        built.append((drafter, describe(model.served_model_name, head, drafter, read_target(Checkpoint(model.model)))))
    with serving_all(built) as address:
        yield address


def target_info(target: str, drafter: str, head: str) -> TargetInfo:
    return TargetInfo(target_fingerprint(target), DraftHead(head, drafter).features_fingerprint())


def generate(address: str, target: str, drafter: str, head: str) -> GenerationStats:
    """Statistics of a request to an engine with that remote drafter; the output is checked."""
    fuser = DraftHead(head, drafter).build_fuser(target, "float32", "cpu")
    needs = DrafterNeeds(features=fuser is not None, samples=True)
    with closing(RemoteDrafter(address, needs, PATIENT, target=target_info(target, drafter, head))) as remote:
        eventually(lambda: remote.connected)
        engine = build_engine(target, fuser, "float32", "cpu", fixed_config(max_kv_tokens=256), TREE, remote)
        request = Request("r", (5, 6, 7), SAMPLING)
        chunks = run(engine, [request])
    assert_plain(target, [request], chunks)
    return stats_of(chunks)


def test_every_verifier_gets_trees_of_the_drafter_that_fits_it(zoo: Zoo, address: str) -> None:
    for target, head in ((zoo.one, zoo.one_head), (zoo.other, zoo.other_head)):
        assert generate(address, target, "eagle3", head).num_drafted > 0
    assert generate(address, zoo.other, "sps", "").offered_by_depth[0] > 0


def test_a_drafter_for_the_features_is_described_first(zoo: Zoo, address: str) -> None:
    with open_sync_channel(address) as channel:
        stub = draft_pb2_grpc.DraftStub(channel)

        def found(target: str, drafter: str, head: str) -> tuple[str, str]:
            wanted = target_info(target, drafter, head)
            reply = stub.Describe(draft_pb2.DescribeRequest(target=target_info_to_proto(wanted)))
            return reply.model.name, reply.method

        assert found(zoo.one, "eagle3", zoo.one_head) == ("one", "eagle3")
        assert found(zoo.other, "eagle3", zoo.other_head) == ("other", "eagle3")
        assert found(zoo.other, "sps", "") == ("other", "sps")
        assert found(zoo.other, "eagle3", zoo.one_head) == ("other", "sps"), "it needs no features"


def test_a_verifier_without_a_match_gets_a_list_of_drafters(zoo: Zoo, address: str) -> None:
    wanted = target_info(zoo.one, "eagle3", zoo.other_head)
    with open_sync_channel(address) as channel:
        stub = draft_pb2_grpc.DraftStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Describe(draft_pb2.DescribeRequest(target=target_info_to_proto(wanted)))
        assert "no drafter here for target" in str(status_error(caught.value))
        assert "eagle3 for one (target" in str(status_error(caught.value))
        assert "sps for other" in str(status_error(caught.value))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Speculate(iter([draft_pb2.SpeculateRequest(step=1)])))
        assert "the verifier names no target" in str(status_error(caught.value))


def test_a_draft_client_rejects_a_drafter_for_another_target(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a service does that has one drafter and does not look at who asks."""
    monkeypatch.setattr(servicer, "choose_worker", lambda workers, wanted: workers[0])
    needs, wanted = DrafterNeeds(features=True), TargetInfo("another", "none")
    with serving(ToyDrafter(), INFO) as address, closing(RemoteDrafter(address, needs, PATIENT, target=wanted)) as remote:
        eventually(lambda: "which is not TargetInfo(target_fingerprint='another'" in caplog.text)
        assert not remote.connected


async def test_each_drafter_has_a_lease_and_the_router_assigns_a_match(url: str) -> None:
    models = [ModelInfo("one", "f1", 100, 1000, "h1"), ModelInfo("two", "f2", 100, 1000, "none")]
    config = DraftConfig(
        "one", "t", "", "suffix", registry=RegistryConfig(url), server=ServerConfig(graceful_shutdown_timeout_s=0)
    )
    served = [(ToyDrafter(), replace(INFO, model=model)) for model in models]
    registry, watcher = Registry(config.registry), Redis.from_url(url)
    await registry.leases("draft")
    before = {client["id"] for client in await watcher.client_list()}
    service = asyncio.create_task(serve_drafters(config, served))
    while len(leases := await registry.leases("draft")) < 2:
        await asyncio.sleep(0.01)
    assert (len({lease.address for lease in leases}), len({lease.incarnation for lease in leases})) == (1, 2)
    new = {client["id"] for client in await watcher.client_list()} - before
    await watcher.aclose()
    assert len(new) == 1, "one connection carries all leases"
    for name, fingerprint, digest in (("one", "f1", "h1"), ("two", "f2", "h9")):
        verifier = Lease("verifier", "there", "v", ModelInfo(name, fingerprint, 100, 1000, digest), Load(1, 0, 99))
        pair = pick(WorkerSnapshot([verifier], leases, {}), RoutingRequest(name, 10), RoutingConfig())
        assert pair is not None
        assert pair.drafter is not None
        assert pair.drafter.model.name == name
    service.cancel()
    await asyncio.gather(service, return_exceptions=True)
    assert await registry.leases("draft") == []
    await registry.close()


@pytest.mark.parametrize("kind", ["static", "kubernetes"])
async def test_every_drafter_of_a_service_is_found_without_leases(kind: str) -> None:
    models = [ModelInfo(name, f"f-{name}", 100, 1000, "none") for name in ("one", "two", "three")]
    port = free_port()
    config = DraftConfig(
        "one", "t", "", "suffix",
        server=ServerConfig(port=port, graceful_shutdown_timeout_s=0), discovery=DiscoveryConfig(kind=kind),
    )  # fmt: skip
    served = [(ToyDrafter(), replace(INFO, model=model)) for model in models]
    service = asyncio.create_task(serve_drafters(config, served))
    async with discovering(settings("static", drafters=(f"127.0.0.1:{port}",)), "draft") as discovery:
        await until(lambda: len(discovery.known("draft")) == 3)
        leases = discovery.known("draft")
        assert {lease.model.name for lease in leases} == {"one", "two", "three"}
        assert len({lease.incarnation for lease in leases}) == 3
        assert len({lease.process for lease in leases}) == 1
        service.cancel()
        await asyncio.gather(service, return_exceptions=True)
        await until(lambda: not discovery.known("draft"))


def test_indistinguishable_drafters_are_refused(zoo: Zoo) -> None:
    info = DrafterInfo(ModelInfo("m", "f00d", 48, 256, "none"), "sps", False, False, 0)
    with pytest.raises(ConfigError, match=r"drafters sps and lookup are both for m .*Remove one"):
        asyncio.run(
            serve_drafters(
                DraftConfig("m", "t", "s", "sps"), [(ToyDrafter(), info), (ToyDrafter(), replace(info, method="lookup"))]
            )
        )
    check_distinct([info, replace(info, model=replace(info.model, fingerprint="other"))])


def test_a_config_lists_its_drafters(tmp_path: Path) -> None:
    file = tmp_path / "draft.yaml"
    file.write_text(
        "served_model_name: a\nmodel: t\ndraft_model: h\nadditional_models:\n"
        "- {served_model_name: b, model: u, method: sps, draft_model: s, drafting: {max_kv_tokens: 9}}\n"
    )
    config = load(DraftConfig, file, ["tree.num_draft_tokens=7"])
    assert config.models == (
        DraftedModel("a", "t", "h", tree=TreeConfig(num_draft_tokens=7)),
        DraftedModel("b", "u", "s", "sps", drafting=DraftingConfig(max_kv_tokens=9)),
    )
    with pytest.raises(ConfigError, match="max_kv_tokens is -1"):
        DraftedModel("b", "u", drafting=DraftingConfig(max_kv_tokens=-1))
    file.write_text("served_model_name: a\nmodel: t\nadditional_models:\n- {served_model_name: b, model: u, tre: 1}\n")
    with pytest.raises(ConfigError, match="tre"):
        load(DraftConfig, file)
