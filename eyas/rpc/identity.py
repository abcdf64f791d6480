"""Certificates and shared tokens of services, read again when their files change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import grpc.aio

from eyas.config import PeersConfig
from eyas.errors import ConfigError

log = logging.getLogger(__name__)
MIN_TOKEN_LENGTH = 16
# Seconds after which files that could not be used are read again, although they look the same.
REREAD_INTERVAL_S = 1.0
ContentT = TypeVar("ContentT")


@dataclass(frozen=True)
class Pem:
    """Content of PEM files; empty without a file. key belongs to the first certificate of cert_chain."""

    cert_chain: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""


class Reloaded(Generic[ContentT]):
    """Content of files, read again when one of them changes. Thread-safe.

    Args:
        read: returns the content; raises ConfigError for files that cannot be used. After a change, the content then stays
            as it was, and the files are read again every REREAD_INTERVAL_S: repaired permissions do not change their times.
        settings: names of the settings, for the log.
        interval_s: seconds between two looks at the files, by `clock`.
    """

    def __init__(
        self,
        paths: Iterable[Path | None],
        read: Callable[[], ContentT],
        settings: str,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = tuple(path for path in paths if path)
        self._read = read
        self._settings = settings
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._look_at = -math.inf
        self._reread_at = math.inf
        self._version = _file_version(self._paths)
        self._content = read()

    def get(self) -> ContentT:
        """Return the content of the files now."""
        with self._lock:
            if self._clock() < self._look_at:
                return self._content
            self._look_at = self._clock() + self._interval_s
            version = _file_version(self._paths)
            if version != self._version or self._clock() >= self._reread_at:
                self._version, self._reread_at = version, math.inf
                try:
                    self._content = self._read()
                    log.info("%s: using the changed files", self._settings)
                except ConfigError as error:
                    self._reread_at = self._clock() + REREAD_INTERVAL_S
                    log.error("%s; what was there before stays in use", error, extra={"rate_limited": True})
            return self._content


def _file_version(paths: Iterable[Path]) -> tuple[int, ...]:
    """Return times and sizes of the files. Taken before reading, so that a change during reading is noticed later."""
    version: list[int] = []
    for path in paths:
        try:
            stat = path.stat()
            version += (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError:
            version.append(0)
    return tuple(version)


class Certificates:
    """PEM files of one side of a TLS connection, reloaded on change. Every file is optional. Thread-safe.

    settings: names of the settings for errors. Raises ConfigError for files that cannot be used.
    """

    def __init__(self, settings: str, cert_file: str = "", key_file: str = "", ca_file: str = "") -> None:
        self._paths = tuple(Path(path) if path else None for path in (cert_file, key_file, ca_file))
        self._settings = settings
        self._content = Reloaded(self._paths, self._read, settings)

    @property
    def pem(self) -> Pem:
        """Content of the files. If changed files cannot be used, the content before the change."""
        return self._content.get()

    def _read(self) -> Pem:
        cert_file, key_file, ca_file = self._paths
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if cert_file and key_file:
                context.load_cert_chain(cert_file, key_file, self._no_password)
            if ca_file:
                context.load_verify_locations(ca_file)
            return Pem(*(path.read_bytes() if path else b"" for path in self._paths))
        except OSError as error:  # includes SSLError
            names = ", ".join(str(path) for path in self._paths if path)
            raise ConfigError(f"{self._settings} cannot be used: {names}: {error}") from error

    def _no_password(self) -> NoReturn:
        """Reject an encrypted key; without this callback OpenSSL waits for a password on the terminal."""
        raise ConfigError(f"{self._settings} cannot be used: {self._paths[1]} is encrypted; give the key without a password")


class SharedToken:
    """The token that router, verifiers and draft services share; it also signs leases. Thread-safe.

    A source may hold several tokens: the first is sent and signs, all are accepted. To replace a token without refusing a
    call, append the new one everywhere, then put it first, then remove the old one.

    Raises ConfigError for a source that cannot be read, or holds no usable token.
    """

    def __init__(self, config: PeersConfig, environment: Mapping[str, str] = os.environ) -> None:
        self._file = Path(config.token_file) if config.token_file else None
        self._env = config.token_env
        self._environment = environment
        self._tokens = Reloaded((self._file,), self._read, "peers.token_file")

    @property
    def first(self) -> str:
        """The token that this service sends."""
        return self._tokens.get()[0]

    def accepts(self, authorization: str) -> bool:
        """Return whether the value of an authorization header, "Bearer TOKEN", holds a valid token. Takes constant time."""
        scheme, _, given = authorization.partition(" ")
        given_bytes = given.strip().encode("utf-8", "surrogateescape")
        same = [hmac.compare_digest(given_bytes, token.encode()) for token in self._tokens.get()]
        return scheme.lower() == "bearer" and any(same)

    def sign(self, message: bytes) -> str:
        """Return the signature of a lease, in hexadecimal digits."""
        return _signature(self.first, message)

    def has_signed(self, message: bytes, signature: str) -> bool:
        """Return whether `sign` of a service with a valid token made the signature. Takes constant time."""
        given = signature.encode("utf-8", "surrogateescape")
        same = [hmac.compare_digest(given, _signature(token, message).encode()) for token in self._tokens.get()]
        return any(same)

    def _read(self) -> tuple[str, ...]:
        if self._file:
            source = f"peers.token_file: the file {self._file}"
            try:
                values = self._file.read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError) as error:
                raise ConfigError(f"peers.token_file: cannot read {self._file}: {error}") from error
        else:
            source = f"peers.token_env: the environment variable {self._env}"
            values = self._environment.get(self._env, "").split(",")
        tokens = tuple(token for value in values if (token := value.strip()))
        if not tokens:
            raise ConfigError(f"{source} holds no token; put one there, such as the output of: openssl rand -hex 32")
        if any(len(token) < MIN_TOKEN_LENGTH or not (token.isascii() and token.isprintable()) for token in tokens):
            raise ConfigError(
                f"{source} holds a token that is shorter than {MIN_TOKEN_LENGTH} characters or not ASCII; "
                "use the output of: openssl rand -hex 32"
            )
        return tokens


def _signature(token: str, message: bytes) -> str:
    return hmac.new(token.encode(), b"eyas lease\n" + message, hashlib.sha256).hexdigest()


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials of a gRPC server; new connections get the present content of the files.

    With a CA file, clients must have a certificate that the CA signed.
    """
    current = certificates.pem

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert_chain)], pem.ca or None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        pem = certificates.pem
        if pem is current:
            return None
        current = pem
        return configuration(pem)

    untyped_fetch: Any = fetch  # the stubs do not allow None, which means "unchanged"
    return grpc.dynamic_ssl_server_credentials(configuration(current), untyped_fetch, bool(current.ca))


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """Return credentials of a gRPC channel; without a CA the system's CAs are trusted."""
    return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert_chain or None)
