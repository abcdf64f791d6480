"""The private parts of grpcio that Eyas uses, for the versions that they were tried with.

grpc.aio decodes the name of a method outside of any call: one that is not UTF-8 would end the whole server (grpcio 1.85). No
public part of grpcio can prevent that. With a version that was not tried, `aio_server` is the library's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from grpc._cython import cygrpc

# Minor versions of grpcio whose private parts are those below.
TRIED_VERSIONS = ("1.85",)
# All that is used of `grpc._cython.cygrpc`, and the methods of its AioServer.
PRIVATE_NAMES = ("AioServer", "ExecuteBatchError", "_MethodResolver", "_handle_rpc", "_schedule_rpc_coro")
PRIVATE_METHODS = ("_make_request_call_future", "_request_call")

log = logging.getLogger(__name__)


class _NeverRaised(Exception):  # stands for an error that this grpcio does not have
    """An error of no call."""


# What a call raises whose client has gone.
ClientHasGone: type[Exception] = getattr(cygrpc, "ExecuteBatchError", _NeverRaised)


def why_untried(version: str = grpc.__version__) -> str:
    """Return why the private parts of a grpcio are left alone, and what that costs; "" if they are used."""
    missing = [name for name in PRIVATE_NAMES if not hasattr(cygrpc, name)]
    if not missing:
        missing = [name for name in PRIVATE_METHODS if not hasattr(cygrpc.AioServer, name)]
    if version.rpartition(".")[0] in TRIED_VERSIONS and not missing:
        return ""
    lacks = f", which has no {', '.join(missing)}" if missing else ""
    return (
        f"Eyas was not tried with grpcio {version}{lacks}: a call whose method's name is not UTF-8 ends this server; "
        f"install grpcio {' or '.join(TRIED_VERSIONS)} where strangers can connect"
    )


def aio_server(
    interceptors: Sequence[Any], options: Sequence[tuple[str, int]], version: str = grpc.__version__
) -> grpc.aio.Server:
    """Return a server that survives names of methods that are not UTF-8. Call it inside the running event loop.

    With a grpcio that was not tried it logs a warning, and returns the library's own server.
    """
    if reason := why_untried(version):
        log.warning("%s", reason)
        return grpc.aio.server(interceptors=interceptors, options=options)
    server = grpc.aio.server()
    loop: Any = asyncio.get_running_loop()
    server._server = _calls_class()(loop, None, (), interceptors, options, None)  # type: ignore[attr-defined]
    return server


def _calls_class() -> Any:
    """Return the class of the calls that reach a server. It is made here, as its base may be missing."""

    class Calls(cygrpc.AioServer):  # type: ignore[misc]
        """Refuses calls of unknown methods without a look at the method's name."""

        def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
            """Return the next call of a registered method; None: of any other."""
            if method is not None:
                return cast("asyncio.Future[Any]", super()._make_request_call_future(method))
            return asyncio.create_task(self._refuse_others())

        async def _refuse_others(self) -> NoReturn:
            loop, refusals = asyncio.get_running_loop(), set[asyncio.Task[None]]()
            while True:
                call = await self._request_call()  # raises once the server stops
                refusal = cygrpc._handle_rpc("", cygrpc._MethodResolver([], {}), (), call, loop, False)
                task = loop.create_task(cygrpc._schedule_rpc_coro(refusal, call, loop, ""))
                refusals.add(task)
                task.add_done_callback(refusals.discard)

    return Calls
