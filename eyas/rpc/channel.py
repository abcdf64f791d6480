"""The one way to dial: given host:port, gives back a gRPC channel that finds its own way back after a break."""

from __future__ import annotations

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 * 2**20

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel for asyncio code; dials lazily. Close it with `await channel.close()`."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def open_sync_channel(address: str) -> grpc.Channel:
    """A channel for code in threads; dials lazily. Close it with `channel.close()`."""
    return grpc.insecure_channel(address, options=_OPTIONS)
