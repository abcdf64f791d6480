"""How the services of one deployment dial and serve one another: settings in, channels and a server's credentials out.

Knows no services.
"""

from __future__ import annotations

import grpc
import grpc.aio

from eyas.config import PeersConfig
from eyas.rpc.certificates import Certificates, Pem, channel_credentials, server_credentials
from eyas.rpc.channel import Line, open_channel, open_sync_channel

_SETTINGS = "peers.certificate, peers.key and peers.authority"


class Peers:
    """One for each service. Safe to use from any thread. Raises ConfigError for certificates that cannot be used."""

    def __init__(self, config: PeersConfig | None = None) -> None:
        self._config = config = config or PeersConfig()
        self._certificates = Certificates(_SETTINGS, config.certificate, config.key, config.authority)

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
        if not config.certificate:
            return None
        if config.clients == "certified":
            return server_credentials(self._certificates)
        return server_credentials(Certificates(_SETTINGS, config.certificate, config.key))

    @property
    def _line(self) -> Line:
        config, pem = self._config, self.identity
        credentials = channel_credentials(pem) if pem.authority else None
        return Line(config.ping_interval, config.ping_timeout, credentials, config.name)
