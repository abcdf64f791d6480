"""Settings of how the services of one deployment meet, as frozen values: signs of life, encryption, patience with drafters.

Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from eyas.config.checks import above_zero, at_least, require
from eyas.errors import ConfigError

Clients = Literal["certified", "any"]


@dataclass(frozen=True)
class PeersConfig:
    """How router, verifiers and drafters talk to one another. Times in seconds.

    ping_interval: how often whoever dials asks for a sign of life. ping_timeout: how long for. A peer that hangs, or that
    the network has swallowed, is given up after both together; what it was doing goes on elsewhere.
    certificate, key: PEM files with the chain that this service shows its peers, and its key. authority: PEM file with the
    certificates of those who sign its peers'. All three are read again once they have changed. Empty speaks without TLS.
    name: the DNS name that every worker's certificate is for, since addresses change; empty takes the host that is dialled.
    clients: whom a worker serves: those who show a certificate that the authority has signed ("certified"), or "any".
    """

    ping_interval: float = 2.0
    ping_timeout: float = 5.0
    certificate: str = ""
    key: str = ""
    authority: str = ""
    name: str = ""
    clients: Clients = "certified"

    def __post_init__(self) -> None:
        above_zero(ping_interval=self.ping_interval, ping_timeout=self.ping_timeout)
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("certificate and key go together; set both or none")
        require(not self.certificate or bool(self.authority), "a certificate is set; set authority too, to know peers by")
        require(not self.name or bool(self.authority), "name is set; set authority too, without which nobody is checked")
        known = ", ".join(get_args(Clients))
        require(self.clients in get_args(Clients), f"clients is {self.clients!r}; it must be one of {known}")

    def check_worker(self) -> None:
        """Raises ConfigError where a worker would dial with TLS and be dialled without."""
        message = "peers.authority is set without a certificate, so this worker would serve without TLS; "
        require(bool(self.certificate) or not self.authority, message + "set peers.certificate and peers.key")


@dataclass(frozen=True)
class DraftLinkConfig:
    """How long a verifier waits for drafts, in seconds.

    deadline: longest wait for the trees of one step; later ones are dropped and the rows decode plainly.
    max_failures: failed or late rounds in a row before the drafter is left alone.
    reset: how long the drafter is left alone at first; twice as long after each attempt that fails, up to 10 s.
    chunk_tokens: most feature rows in one message.
    """

    deadline: float = 0.1
    max_failures: int = 3
    reset: float = 0.5
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        above_zero(deadline=self.deadline, reset=self.reset)
        at_least(1, max_failures=self.max_failures)
        at_least(2, chunk_tokens=self.chunk_tokens)
