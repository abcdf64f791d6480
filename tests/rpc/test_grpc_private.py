"""The private parts of grpcio: each is there, and a server runs without them."""

import logging

import grpc
import pytest
from grpc._cython import cygrpc

from eyas.rpc.grpc_private import PRIVATE_METHODS, PRIVATE_NAMES, ClientHasGone, aio_server, why_untried


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_installed_grpcio_has_the_private_name(name: str) -> None:
    assert hasattr(cygrpc, name)


@pytest.mark.parametrize("name", PRIVATE_METHODS)
def test_the_installed_grpcio_has_the_private_method(name: str) -> None:
    assert hasattr(cygrpc.AioServer, name)


def test_the_installed_grpcio_was_tried() -> None:
    assert why_untried() == ""
    assert ClientHasGone is cygrpc.ExecuteBatchError


async def test_an_untried_grpcio_serves_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        server = aio_server((), (), version="1.99.0")
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/eyas.v1.Draft/Nothing")(b"", timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.stop(0)
    assert "not tried with grpcio 1.99.0" in caplog.text
    assert "install grpcio 1.85" in caplog.text


def test_a_grpcio_without_a_private_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.rpc.grpc_private.PRIVATE_NAMES", (*PRIVATE_NAMES, "_gone"))
    assert "which has no _gone" in why_untried()
