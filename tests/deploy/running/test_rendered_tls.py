"""With certificates and API keys the chart's demo serves TLS to clients and between its services, requires a key, and
passes its probes, also when certificates are renewed."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tests.deploy.charts import CHART, Object, settings, template
from tests.deploy.running.kubelet import Node, running
from tests.support.services.authority import Authority

pytestmark = pytest.mark.nightly

DRAFT, VERIFIER, ROUTER = (f"demo-eyas-{part}" for part in ("draft", "verifier", "router"))
ASKED = {"model": "demo", "prompt": "def add(", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
KEY = {"Authorization": "Bearer second-key"}


def secret(name: str, **data: str) -> Object:
    return {"kind": "Secret", "metadata": {"name": name}, "stringData": data}


def certified(authority: Authority, folder: Path, name: str) -> dict[str, str]:
    """The files of a Secret of type kubernetes.io/tls."""
    authority.write(folder, name)
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    assignments = (
        "router.tls.existingSecret=router-tls",
        "router.apiKeys.existingSecret=keys",
        "peers.tls.existingSecret=peers",
        "verifier.config.validate_head=never",
    )
    rendered = template("--values", str(CHART / "values" / "cpu-demo.yaml"), *settings(assignments))
    brought = [
        secret("router-tls", **certified(Authority("public"), tmp_path / "router-tls", "llm.example.com")),
        secret("peers", **certified(Authority("ours"), tmp_path / "peers", "eyas-peers")),
        secret("keys", **{"api-keys": "first-key\nsecond-key\n"}),
    ]
    with running([*rendered, *brought], tmp_path) as node:
        yield node


def mount(node: Node, workload: str, folder: str) -> Path:
    return node.folder / node.pods[workload].name / "etc" / folder


def drafted(client: httpx.Client) -> bool:
    """Whether a request is answered with drafted tokens."""
    answer = client.post("/v1/completions", json=ASKED, headers=KEY).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 24
    return bool(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])


def eventually_drafted(client: httpx.Client) -> None:
    assert any(drafted(client) for _ in range(200)), "no drafter helps"


def serves_without_certificate(node: Node, workload: str) -> bool:
    pod = node.pods[workload]
    authority = (mount(node, workload, "eyas-peers") / "ca.crt").read_bytes()
    options = (("grpc.ssl_target_name_override", "eyas-peers"),)
    with grpc.secure_channel(f"127.0.0.1:{pod.port('grpc')}", grpc.ssl_channel_credentials(authority), options) as channel:
        call = channel.unary_unary("/eyas.v1.Worker/Status").future(b"", timeout=60)
        return bool(call.code() is grpc.StatusCode.OK)


def test_all_traffic_is_encrypted_through_certificate_renewal(node: Node, tmp_path: Path) -> None:
    address = f"https://127.0.0.1:{node.pods[ROUTER].port('http')}"
    trust = ssl.create_default_context(cafile=str(mount(node, ROUTER, "eyas-tls") / "ca.crt"))
    with httpx.Client(verify=trust, base_url=address, timeout=250) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        eventually_drafted(client)
        assert not any(serves_without_certificate(node, workload) for workload in (VERIFIER, DRAFT))
        renewed = certified(Authority("next"), tmp_path / "renewed", "eyas-peers")
        for workload in (ROUTER, VERIFIER, DRAFT):
            for file, text in renewed.items():
                (mount(node, workload, "eyas-peers") / file).write_text(text)
        for workload in (ROUTER, VERIFIER, DRAFT):
            node.pods[workload].wait("readiness")
        node.pods[DRAFT].terminate()
        assert node.pods[DRAFT].ended() == 0
        assert not drafted(client)
        node.objects = [item for item in node.objects if item["metadata"]["name"] != "peers"] + [secret("peers", **renewed)]
        node.start(DRAFT)
        node.wait(DRAFT)
        eventually_drafted(client)
    node.pods[ROUTER].terminate()
    assert node.pods[ROUTER].ended() == 0
