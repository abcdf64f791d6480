"""A router that the chart gives a certificate and API keys speaks TLS, asks for a key, and still passes its probes."""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.deploy.charts import CHART, Object, settings, template
from tests.deploy.running.kubelet import Node

ROUTER = "demo-eyas-router"


def secret(name: str, **data: str) -> Object:
    return {"kind": "Secret", "metadata": {"name": name}, "stringData": data}


def certificate() -> Object:
    """A Secret of type kubernetes.io/tls for this machine, its own authority."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "eyas")])
    begin, serial = datetime.now(UTC) - timedelta(days=1), x509.random_serial_number()
    place = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    draft = x509.CertificateBuilder(name, name, key.public_key(), serial, begin, begin + timedelta(days=2))
    signed = draft.add_extension(place, critical=False).sign(key, hashes.SHA256())
    pem, form, open_key = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    data = {"tls.crt": signed.public_bytes(pem).decode(), "tls.key": key.private_bytes(pem, form, open_key).decode()}
    return secret("doors", **data)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """The router alone; no Redis and no verifier are there."""
    assignments = (
        "router.tls.existingSecret=doors",
        "router.apiKeys.existingSecret=keys",
        "redis.auth.existingSecret=redis",
    )
    rendered = template("--values", str(CHART / "values" / "cpu-demo.yaml"), *settings(assignments))
    redis = secret("redis", url="redis://127.0.0.1:1/0", password="none")
    node = Node([*rendered, certificate(), secret("keys", **{"api-keys": "first-key\nsecond-key\n"}), redis], tmp_path)
    try:
        node.start(ROUTER)
        yield node
    finally:
        node.pods[ROUTER].process.kill()
        node.pods[ROUTER].process.wait()


def test_a_router_with_certificate_and_keys_passes_its_probes_and_asks_for_a_key(node: Node) -> None:
    pod = node.pods[ROUTER]
    for kind in ("startup", "liveness"):
        pod.wait(kind)
    assert not pod.passes("readiness"), "there is no verifier"
    address = f"https://127.0.0.1:{pod.port('http')}/v1/models"
    trust = ssl.create_default_context(cafile=str(node.folder / pod.name / "etc" / "eyas-tls" / "tls.crt"))
    with httpx.Client(verify=trust) as client:
        assert client.get(address).status_code == 401
        assert client.get(address, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get(address, headers={"Authorization": "Bearer second-key"}).status_code == 200
    pod.terminate()
    assert pod.ended() == 0
