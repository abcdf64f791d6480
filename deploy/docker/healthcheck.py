"""Ends with 0 if one of the addresses given answers: grpc://host:port by its health service, http(s)://... by status 200."""

import ssl
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def healthy(address: str) -> bool:
    """Whether the service at `address` says that it is well."""
    scheme, _, rest = address.partition("://")
    return serves_grpc(rest) if scheme == "grpc" else serves_http(address)


def serves_grpc(address: str) -> bool:
    """Whether health there says SERVING."""
    with grpc.insecure_channel(address) as channel:
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


if __name__ == "__main__":
    sys.exit(not any(healthy(address) for address in sys.argv[1:]))
