"""Exit with 0 if one of the addresses is healthy: grpc://host:port by its health service, http(s)://... by status 200.

--tls FOLDER: use TLS for gRPC, with tls.crt, tls.key and ca.crt in FOLDER. --name: server name expected in the certificate.
--service: name in the health service; empty for the whole server, "live" for liveness.
"""

import argparse
import ssl
import sys
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def healthy(address: str, tls: Path | None, name: str, service: str) -> bool:
    """Return whether the service at `address` is healthy."""
    scheme, _, rest = address.partition("://")
    return serves_grpc(rest, tls, name, service) if scheme == "grpc" else serves_http(address)


def open_channel(address: str, tls: Path | None, name: str) -> grpc.Channel:
    """Open a gRPC channel, with TLS if there is a folder of certificates."""
    if tls is None:
        return grpc.insecure_channel(address)
    ca, key, chain = ((tls / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt"))
    options = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, chain), options)


def serves_grpc(address: str, tls: Path | None, name: str, service: str) -> bool:
    """Return whether the gRPC health service answers SERVING for a service."""
    with open_channel(address, tls, name) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def serves_http(url: str) -> bool:
    """Return whether the URL answers 200. The certificate is not verified: it names the Service, not 127.0.0.1."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--service", default="")
    options = parser.parse_args()
    return int(not any(healthy(address, options.tls, options.name, options.service) for address in options.addresses))


if __name__ == "__main__":
    sys.exit(main())
