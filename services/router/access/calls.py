"""Keys and TLS of the gRPC door: what stands before its own services. Knows no messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from eyas.config import TlsConfig
from eyas.errors import ConfigError, Unauthenticated
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
    """What a gRPC server needs for TLS; None without it. Raises ConfigError for a file that cannot be read."""
    if not config.certificate:
        return None
    try:
        key, chain = Path(config.key).read_bytes(), Path(config.certificate).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.certificate and tls.key cannot be used: {error}") from error
    return grpc.ssl_server_credentials([(key, chain)])
