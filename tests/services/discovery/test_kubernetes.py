"""Workers found by EndpointSlices, whatever the API server does: no zombie is kept, no worker is lost."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.config import DiscoveryConfig, KubernetesConfig
from eyas.errors import ConfigError
from eyas.services.discovery.kubernetes import KubernetesEndpoints, open_api
from eyas.services.local.cluster import free_port
from tests.support.services.api_server import ApiServer, pod, running
from tests.support.services.pods import discovering, kubernetes, names, pod_router, pod_worker, settings
from tests.support.services.scripted_verifier import CALL, REST, send, tokens_of, until

DRAFTERS = "app.kubernetes.io/component=draft"
FOR_EVER = 600.0
SOON = 0.3


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("eyas.services.discovery.kubernetes.RETRY_S", 0.02)
    return iter(())


async def test_a_router_serves_with_workers_of_endpoint_slices() -> None:
    async with (
        running(ApiServer()) as api,
        pod_worker() as worker,
        pod_worker(role="draft") as drafter,
        pod_router(kubernetes(api)) as (address, workers),
    ):
        api.put("v", worker.address, pod(worker.address, ready=True, serving=True, terminating=False, zone="west"))
        api.put("d", drafter.address, pod(drafter.address, "other"), label=DRAFTERS)
        await until(lambda: bool(workers.reachable and workers.snapshot().drafters))
        assert tokens_of(await send(address, CALL)) == REST
        assert workers.snapshot().verifiers[0].zone == "west"
        assert worker.script.calls[0].drafter == drafter.address


@pytest.mark.parametrize(
    "conditions",
    [{"ready": False}, {"ready": True, "serving": False}, {"ready": True, "serving": True, "terminating": True}],
)
async def test_a_pod_that_is_not_ready_gets_no_work(conditions: dict[str, bool]) -> None:
    async with running(ApiServer()) as api, pod_worker() as one, pod_worker() as other:
        api.put("one", one.address, pod(one.address, "one"))
        api.put("other", other.address, pod(other.address, "other", ready=True))
        async with discovering(kubernetes(api, FOR_EVER)) as discovery:
            await until(lambda: names(discovery) == {one.incarnation, other.incarnation})
            api.put("one", one.address, pod(one.address, "one", **conditions))
            await until(lambda: names(discovery) == {other.incarnation})


async def test_slices_without_endpoints_or_our_port_yield_no_workers() -> None:
    async with running(ApiServer()) as api, pod_worker() as worker:
        api.put("empty", worker.address)
        api.put("metrics", worker.address, pod(worker.address), port_name="metrics")
        async with discovering(kubernetes(api, FOR_EVER)) as discovery:
            api.bookmark()
            api.put("later", worker.address, pod(worker.address, "later"))
            await until(lambda: names(discovery) == {worker.incarnation})
            api.delete("later")
            await until(lambda: not names(discovery))
            assert api.num_lists == 1, "one watch reported all changes"


async def test_a_stalled_watch_hides_nothing_for_long(caplog: pytest.LogCaptureFixture) -> None:
    async with running(ApiServer(mute=True)) as api, pod_worker() as worker, discovering(kubernetes(api, SOON)) as discovery:
        await until(lambda: api.num_watching == 1)
        api.put("v", worker.address, pod(worker.address))
        await until(lambda: names(discovery) == {worker.incarnation})
        api.delete("v")
        await until(lambda: not names(discovery))
    assert "cannot read" not in caplog.text


async def test_workers_survive_an_api_server_outage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    api = ApiServer()
    async with pod_worker() as one, pod_router(kubernetes(api)) as (address, workers):
        async with pod_worker() as other:
            async with running(api):
                for name, worker in (("one", one), ("other", other)):
                    api.put(name, worker.address, pod(worker.address, name))
                await until(lambda: bool(workers.reachable) and len(workers.snapshot().verifiers) == 2)
                caplog.clear()
            await until(lambda: caplog.text.count("keeping the last list") == 2)
            assert len(workers.snapshot().verifiers) == 2
            assert tokens_of(await send(address, CALL)) == REST
        await until(lambda: [lease.incarnation for lease in workers.snapshot().verifiers] == [one.incarnation])
        assert caplog.text.count("keeping the last list") == 2, "once for each role"
        async with pod_worker() as third, running(api):
            api.put("third", third.address, pod(third.address, "third"))
            await until(lambda: third.incarnation in {lease.incarnation for lease in workers.snapshot().verifiers})
    assert "the Kubernetes API server answers again" in caplog.text


async def test_discovery_is_not_synced_without_the_api_server(caplog: pytest.LogCaptureFixture) -> None:
    config = settings("kubernetes", kubernetes=KubernetesConfig(f"http://127.0.0.1:{free_port()}", "test"))
    async with discovering(config) as discovery:
        await until(lambda: "cannot read the verifier endpoints" in caplog.text)
        assert not discovery.has_synced("verifier")
    server = ApiServer()
    async with running(server), discovering(kubernetes(server)) as discovery:
        await until(lambda: discovery.has_synced("verifier"))
        assert not names(discovery)


async def test_an_expired_watch_restarts(caplog: pytest.LogCaptureFixture) -> None:
    async with running(ApiServer()) as api, pod_worker() as worker, discovering(kubernetes(api, FOR_EVER)) as discovery:
        await until(lambda: api.num_watching == 1)
        api.forget()
        api.put("v", worker.address, pod(worker.address))
        await until(lambda: names(discovery) == {worker.incarnation})
    assert "cannot read" not in caplog.text


async def test_a_reused_address_is_another_worker() -> None:
    port = free_port()
    async with running(ApiServer()) as api, discovering(kubernetes(api, FOR_EVER)) as discovery:
        async with pod_worker(port=port) as first:
            api.put("v", first.address, pod(first.address, "first"))
            await until(lambda: names(discovery) == {first.incarnation})
            first.gate.clear()
            api.put("v", first.address, pod(first.address, "second"))
            await until(lambda: not names(discovery))
        async with pod_worker(port=port) as second:
            await until(lambda: names(discovery) == {second.incarnation})


async def test_missing_permissions_are_reported_with_a_fix(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running(ApiServer(error_status=403)) as api,
        pod_worker() as worker,
        discovering(kubernetes(api)) as discovery,
    ):
        await until(lambda: "403" in caplog.text)
        api.error_status = 0
        api.put("v", worker.address, pod(worker.address))
        await until(lambda: names(discovery) == {worker.incarnation})
    assert "needs get, list and watch on endpointslices of discovery.k8s.io" in caplog.text


async def test_a_missing_router_address_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"KUBECONFIG, or discovery\.kubernetes\.api_server"):
        await KubernetesEndpoints(DiscoveryConfig(kind="kubernetes")).open()


async def test_a_kubeconfig_names_the_server_and_the_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(
        "{current-context: c, users: [{name: u, user: {token: t}}], "
        "clusters: [{name: k, cluster: {server: 'http://there:1'}}], "
        "contexts: [{name: c, context: {cluster: k, user: u, namespace: birds}}]}"
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    client, namespace = await open_api(KubernetesConfig())
    await client.close()
    assert (client.configuration.host, namespace) == ("http://there:1", "birds")
