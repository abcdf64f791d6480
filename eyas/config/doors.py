"""Settings of the router's doors as frozen values: where HTTP listens, who may ask, what it is encrypted with.

Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.errors import ConfigError


@dataclass(frozen=True)
class HttpConfig:
    """Where the router speaks HTTP. port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must lie in [0, 65535]")


@dataclass(frozen=True)
class KeysConfig:
    """Where the router's API keys are; without any, everybody may ask.

    env: name of an environment variable that holds them, separated by commas. file: a file with one on each line.
    """

    env: str = ""
    file: str = ""


@dataclass(frozen=True)
class TlsConfig:
    """Files with a certificate chain and its key, both PEM; empty speaks without TLS."""

    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("certificate and key go together; set both or none")
