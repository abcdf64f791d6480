"""PEM files that are renewed under a running service: paths in, what they hold now out. Knows no sockets and no peers."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc

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
