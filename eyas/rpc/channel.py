"""PEM files that are renewed under a running service: paths in, what they hold now out. Knows no sockets and no peers.

The one way to dial: given host:port, gives back a gRPC channel that finds its own way back after a break.

How the services of one deployment dial and serve one another: settings in, channels and a server's credentials out.

Knows no services.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from eyas.config import PeersConfig
from eyas.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pem:
    """What the files held when they were read; empty where there is no file. chain and key belong together."""

    chain: bytes = b""
    key: bytes = field(default=b"", repr=False)
    authority: bytes = b""


class Certificates:
    """The files of one side of TLS, each of which may be left out. Safe to use from any thread.

    settings: what they are called in the settings, for errors. Raises ConfigError for files that cannot be used.
    """

    def __init__(self, settings: str, certificate: str = "", key: str = "", authority: str = "") -> None:
        self._paths = tuple(Path(path) if path else None for path in (certificate, key, authority))
        self._settings = settings
        self._lock = threading.Lock()
        self._stamp = self._now()
        self._pem = self._read()

    @property
    def pem(self) -> Pem:
        """What the files hold. Of files that have changed and cannot be used, the last ones that could be."""
        with self._lock:
            stamp = self._now()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._pem = self._read()
                    log.info("%s: renewed certificates are in use", self._settings)
                except ConfigError as error:
                    log.warning("%s; going on with those read before", error)
            return self._pem

    def _now(self) -> tuple[int, ...]:
        """Times and sizes of the files, taken before they are read, so that a change meanwhile shows the next time."""
        stamp: list[int] = []
        for path in filter(None, self._paths):
            try:
                stat = path.stat()
                stamp += (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            except OSError:
                stamp.append(0)
        return tuple(stamp)

    def _read(self) -> Pem:
        certificate, key, authority = self._paths
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if certificate and key:
                context.load_cert_chain(certificate, key, self._no_password)
            if authority:
                context.load_verify_locations(authority)
            return Pem(*(path.read_bytes() if path else b"" for path in self._paths))
        except OSError as error:  # an SSLError is one
            names = ", ".join(str(path) for path in self._paths if path)
            raise ConfigError(f"{self._settings} cannot be used: {names}: {error}") from error

    def _no_password(self) -> NoReturn:
        """Asked for where a key is encrypted; OpenSSL would ask whoever sits at the terminal, and wait."""
        raise ConfigError(f"{self._settings} cannot be used: {self._paths[1]} is encrypted; give the key without a password")


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials of a gRPC server that shows new callers what the files hold then.

    With an authority, callers must show a certificate that it has signed.
    """
    used = certificates.pem

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.authority or None)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        pem = certificates.pem
        if pem is used:
            return None
        used = pem
        return configuration(pem)

    fetch: Any = renewed  # None, which says that nothing is new, is missing in the stubs
    return grpc.dynamic_ssl_server_credentials(configuration(used), fetch, bool(used.authority))


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """Credentials of a gRPC channel: without an authority, those whom the system trusts are trusted."""
    return grpc.ssl_channel_credentials(pem.authority or None, pem.key or None, pem.chain or None)


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
class ChannelOptions:
    """How a channel is kept. Times in seconds; the default is gentle on strangers: unless told otherwise, gRPC's servers
    hang up on who asks more than once in 5 minutes while they have nothing to say.

    keepalive_interval_s: how often the other side is asked for a sign of life. keepalive_timeout_s: how long for, before it is given up.
    credentials: for TLS; None speaks without it. name: whom the certificate there must be for; empty takes the host dialled.
    """

    keepalive_interval_s: float = 330.0
    keepalive_timeout_s: float = 5.0
    credentials: grpc.ChannelCredentials | None = None
    name: str = ""

    @property
    def options(self) -> tuple[tuple[str, int | str], ...]:
        """gRPC's words for it."""
        pings = (
            ("grpc.keepalive_time_ms", round(self.keepalive_interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # By itself the former does nothing: a ping, whatever it is sent for, has this long, which is a minute if unset.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
        )
        name = (("grpc.ssl_target_name_override", self.name),) if self.name else ()
        return (*_OPTIONS, *pings, *name)


_PLAIN = ChannelOptions()


def open_channel(address: str, line: ChannelOptions = _PLAIN) -> grpc.aio.Channel:
    """A channel for asyncio code; dials lazily. Close it with `await channel.close()`."""
    if line.credentials is None:
        return grpc.aio.insecure_channel(address, options=line.options)
    return grpc.aio.secure_channel(address, line.credentials, options=line.options)


def open_sync_channel(address: str, line: ChannelOptions = _PLAIN) -> grpc.Channel:
    """A channel for code in threads; dials lazily. Close it with `channel.close()`."""
    if line.credentials is None:
        return grpc.insecure_channel(address, options=line.options)
    return grpc.secure_channel(address, line.credentials, options=line.options)


_SETTINGS = "peers.cert_file, peers.key_file and peers.ca_file"


class Peers:
    """One for each service. Safe to use from any thread. Raises ConfigError for certificates that cannot be used."""

    def __init__(self, config: PeersConfig | None = None) -> None:
        self._config = config = config or PeersConfig()
        self._certificates = Certificates(_SETTINGS, config.cert_file, config.key_file, config.ca_file)

    @property
    def identity(self) -> Pem:
        """What new channels are opened with. A channel keeps what it was opened with: once this is another object, an old
        channel may be unable to dial again."""
        return self._certificates.pem

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """A channel for asyncio code."""
        return open_channel(address, self._line)

    def open_sync_channel(self, address: str) -> grpc.Channel:
        """A channel for code in threads."""
        return open_sync_channel(address, self._line)

    @property
    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What a worker serves with; None without TLS."""
        config = self._config
        if not config.cert_file:
            return None
        if config.require_client_cert:
            return server_credentials(self._certificates)
        return server_credentials(Certificates(_SETTINGS, config.cert_file, config.key_file))

    @property
    def _line(self) -> ChannelOptions:
        config, pem = self._config, self.identity
        credentials = channel_credentials(pem) if pem.authority else None
        return ChannelOptions(config.keepalive_interval_s, config.keepalive_timeout_s, credentials, config.tls_server_name)
