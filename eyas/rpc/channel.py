"""The one way to dial: given host:port, gives back a gRPC channel that finds its own way back after a break."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 * 2**20

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True)
class Line:
    """How a channel is kept. Times in seconds; the default is gentle on strangers: unless told otherwise, gRPC's servers
    hang up on who asks more than once in 5 minutes while they have nothing to say.

    ping_interval: how often the other side is asked for a sign of life. ping_timeout: how long for, before it is given up.
    credentials: for TLS; None speaks without it. name: whom the certificate there must be for; empty takes the host dialled.
    """

    ping_interval: float = 330.0
    ping_timeout: float = 5.0
    credentials: grpc.ChannelCredentials | None = None
    name: str = ""

    @property
    def options(self) -> tuple[tuple[str, int | str], ...]:
        """gRPC's words for it."""
        pings = (
            ("grpc.keepalive_time_ms", round(self.ping_interval * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.ping_timeout * 1000)),
            # By itself the former does nothing: a ping, whatever it is sent for, has this long, which is a minute if unset.
            ("grpc.http2.ping_timeout_ms", round(self.ping_timeout * 1000)),
        )
        name = (("grpc.ssl_target_name_override", self.name),) if self.name else ()
        return (*_OPTIONS, *pings, *name)


_PLAIN = Line()


def open_channel(address: str, line: Line = _PLAIN) -> grpc.aio.Channel:
    """A channel for asyncio code; dials lazily. Close it with `await channel.close()`."""
    if line.credentials is None:
        return grpc.aio.insecure_channel(address, options=line.options)
    return grpc.aio.secure_channel(address, line.credentials, options=line.options)


def open_sync_channel(address: str, line: Line = _PLAIN) -> grpc.Channel:
    """A channel for code in threads; dials lazily. Close it with `channel.close()`."""
    if line.credentials is None:
        return grpc.insecure_channel(address, options=line.options)
    return grpc.secure_channel(address, line.credentials, options=line.options)
