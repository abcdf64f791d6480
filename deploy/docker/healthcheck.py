"""Ends with 0 if one of the addresses given answers: grpc://host:port by its health service, http(s)://... by status 200.

--tls FOLDER: gRPC there wants TLS, with the FOLDER's tls.crt, tls.key and ca.crt; --name: whom its certificate is for.
"""

import argparse
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def healthy(address: str, tls: Path | None, name: str) -> bool:
    """Whether the service at `address` says that it is well."""
    scheme, _, rest = address.partition("://")
    return serves_grpc(rest, tls, name) if scheme == "grpc" else serves_http(address)


def dial(address: str, tls: Path | None, name: str) -> grpc.Channel:
    """A channel; with TLS where there is a folder of certificates."""
    if tls is None:
        return grpc.insecure_channel(address)
    authority, key, chain = ((tls / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt"))
    options = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, chain), options)


def serves_grpc(address: str, tls: Path | None, name: str) -> bool:
    """Whether health there says SERVING."""
    with dial(address, tls, name) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def serves_http(url: str) -> bool:
    """The certificate is not looked at: it names the Service, not this process."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=SECONDS, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--name", default="")
    given = parser.parse_args()
    return int(not any(healthy(address, given.tls, given.name) for address in given.addresses))


if __name__ == "__main__":
    sys.exit(main())
