"""Keys and TLS of the gRPC door: what stands before its own services. Knows no messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from eyas.config import TlsConfig
from eyas.errors import Unauthenticated
from eyas.rpc.certificates import Certificates
from eyas.rpc.certificates import server_credentials as credentials_of
from services.router.access.keys import Keys

_OURS = "/eyas."


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls of Eyas' own services in with the metadata `authorization: Bearer KEY`; health and reflection are open."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        metadata = cast("tuple[tuple[str, str], ...]", handler_call_details.invocation_metadata or ())
        given = dict(metadata).get("authorization", "")
        if not handler_call_details.method.startswith(_OURS) or self._keys.admit(given):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: Any) -> NoReturn:
    raise Unauthenticated("no known API key; send one as the metadata 'authorization: Bearer KEY'")


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """What a gRPC server needs for TLS; None without it. Raises ConfigError for files that cannot be used."""
    return (
        credentials_of(Certificates("tls.certificate and tls.key", config.certificate, config.key))
        if config.certificate
        else None
    )
