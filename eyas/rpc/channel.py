"""gRPC channels: how services dial each other. `identity` has their credentials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from eyas.config import PeersConfig
from eyas.errors import Unauthenticated
from eyas.rpc.identity import Certificates, Pem, SharedToken, channel_credentials, server_credentials

MAX_MESSAGE_BYTES = 64 * 2**20

Metadata = tuple[tuple[str, str], ...]

_GRPC_OPTIONS = (
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


class Peers:
    """Channels to other services, and the credentials of a worker's server. One object per service; thread-safe.

    token: shared by all services; None without one. Raises ConfigError for certificates or a token that cannot be used.
    """

    _SETTINGS = "peers.cert_file, peers.key_file and peers.ca_file"

    def __init__(self, config: PeersConfig | None = None) -> None:
        self._config = config = config or PeersConfig()
        self._certificates = Certificates(self._SETTINGS, config.cert_file, config.key_file, config.ca_file)
        self.token = SharedToken(config) if config.token_file or config.token_env else None

    @property
    def identity(self) -> Pem:
        """Certificates of new channels; another object after a renewal.

        A channel keeps the certificates that it was opened with. After a renewal it may fail to reconnect.
        """
        return self._certificates.pem

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Open a channel for asyncio code."""
        return open_channel(address, self._channel_options())

    def open_sync_channel(self, address: str) -> grpc.Channel:
        """Open a channel for threads."""
        return open_sync_channel(address, self._channel_options())

    @property
    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a worker's server; None without TLS."""
        config = self._config
        if not config.cert_file:
            return None
        if config.require_client_cert:
            return server_credentials(self._certificates)
        return server_credentials(Certificates(self._SETTINGS, config.cert_file, config.key_file))

    @property
    def metadata(self) -> Metadata:
        """Metadata of every call to a worker: the shared token, if there is one."""
        return (("authorization", f"Bearer {self.token.first}"),) if self.token else ()

    @property
    def identifies_clients(self) -> bool:
        """Return whether a worker's server knows who calls it: by the token or by a client certificate."""
        return bool(self.token or (self._config.cert_file and self._config.require_client_cert))

    def check_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Check the metadata of a call to a worker. Raises Unauthenticated without the shared token."""
        if self.token is None or self.token.accepts(dict(metadata).get("authorization", "")):
            return
        raise Unauthenticated(
            "this worker accepts calls of its router and verifiers only, which send the shared token; "
            "set peers.token_file or peers.token_env of the caller to the worker's"
        )

    def check_certificate(self, auth_context: Mapping[str, Iterable[bytes]]) -> None:
        """Check the client's certificate. auth_context: of the call. Raises Unauthenticated for a name not allowed."""
        if not self._config.allowed_names:
            return
        keys = ("x509_subject_alternative_name", "x509_common_name")
        names = sorted({name.decode(errors="replace") for key in keys for name in auth_context.get(key, ())})
        if not set(names) & set(self._config.allowed_names):
            raise Unauthenticated(f"the client certificate is for {', '.join(names)}; peers.allowed_names has none of these")

    def _channel_options(self) -> ChannelOptions:
        config, pem = self._config, self.identity
        credentials = channel_credentials(pem) if pem.ca else None
        return ChannelOptions(config.keepalive_interval_s, config.keepalive_timeout_s, credentials, config.tls_server_name)


@dataclass(frozen=True)
class ChannelOptions:
    """Keepalive and TLS of a channel.

    The default interval suits every gRPC server: by default servers close connections with more than one idle ping in 5
    minutes.

    Attributes:
        keepalive_interval_s: seconds between keepalive pings.
        keepalive_timeout_s: seconds to wait for the answer, before the connection is closed.
        credentials: TLS credentials; None disables TLS.
        server_name: name expected in the server's certificate; empty expects the host of the address.
    """

    keepalive_interval_s: float = 330.0
    keepalive_timeout_s: float = 5.0
    credentials: grpc.ChannelCredentials | None = None
    server_name: str = ""

    @property
    def grpc_options(self) -> tuple[tuple[str, int | str], ...]:
        """Channel arguments of gRPC."""
        keepalive = (
            ("grpc.keepalive_time_ms", round(self.keepalive_interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # keepalive_timeout_ms has no effect alone: any ping has this timeout, which is a minute if unset.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
        )
        server_name = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
        return (*_GRPC_OPTIONS, *keepalive, *server_name)


_DEFAULT = ChannelOptions()


def open_channel(address: str, options: ChannelOptions = _DEFAULT) -> grpc.aio.Channel:
    """Open a channel for asyncio code. It connects lazily and reconnects; close it with `await channel.close()`."""
    if options.credentials is None:
        return grpc.aio.insecure_channel(address, options=options.grpc_options)
    return grpc.aio.secure_channel(address, options.credentials, options=options.grpc_options)


def open_sync_channel(address: str, options: ChannelOptions = _DEFAULT) -> grpc.Channel:
    """Open a channel for threads. It connects lazily and reconnects; close it with `channel.close()`."""
    if options.credentials is None:
        return grpc.insecure_channel(address, options=options.grpc_options)
    return grpc.secure_channel(address, options.credentials, options=options.grpc_options)
