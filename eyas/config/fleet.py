"""Settings of how workers are found, chosen and avoided. A value out of range raises ConfigError wherever it is constructed.

Knows no files and no services.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from eyas.errors import ConfigError

DiscoveryKind = Literal["redis", "static", "kubernetes"]


@dataclass(frozen=True)
class KubernetesConfig:
    """How workers are found by their Services' EndpointSlices.

    api_server: URL of one that asks for no credentials; empty takes the pod's service account, else the kubeconfig.
    namespace: empty takes the pod's own, else that of the kubeconfig's context.
    verifier_selector, draft_selector: label selectors of the slices; these bear the labels of their Service.
    port_name: the Service's port that speaks gRPC.
    list_interval: seconds after which everything is listed anew, whatever the watch says.
    """

    api_server: str = ""
    namespace: str = ""
    verifier_selector: str = "app.kubernetes.io/component=verifier"
    draft_selector: str = "app.kubernetes.io/component=draft"
    port_name: str = "grpc"
    list_interval: float = 30.0

    def __post_init__(self) -> None:
        _above(0, list_interval=self.list_interval)


@dataclass(frozen=True)
class DiscoveryConfig:
    """How live workers are found. Times in seconds.

    kind: "redis" reads the leases that workers keep in the registry; "static" asks the workers named here; "kubernetes" asks
    those that EndpointSlices name.
    verifiers, drafters: host:port of each worker, for "static".
    probe_interval: how often a worker is asked for its state, where it publishes no lease. probe_timeout: how long for.
    forget_after: how long a worker may leave that unanswered and still count as live.
    """

    kind: DiscoveryKind = "redis"
    verifiers: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    probe_interval: float = 1.0
    probe_timeout: float = 2.0
    forget_after: float = 5.0
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def __post_init__(self) -> None:
        kinds = get_args(DiscoveryKind)
        _require(self.kind in kinds, f"kind is {self.kind!r}; it must be one of {', '.join(kinds)}")
        _above(0, probe_interval=self.probe_interval, probe_timeout=self.probe_timeout, forget_after=self.forget_after)
        for address in (*self.verifiers, *self.drafters):
            host, _, port = address.rpartition(":")
            _require(bool(host) and port.isdecimal(), f"address {address!r} is not host:port, such as verifier-0:50051")
        named = bool(self.verifiers or self.drafters)
        _require(not named or self.kind == "static", f"workers are named, but kind is {self.kind}; set it to static")


@dataclass(frozen=True)
class PlacementConfig:
    """What makes a verifier, and its drafter, the right one for a request: weights of a score, each with a share in [0, 1].

    session: where the session's last request ran. prefix: share of the prompt that is cached there. load: requests there,
    taken off. slots: share of the needed token slots that are missing, taken off. queue: requests waiting there, taken off.
    home: where a hash of the session points, which outlasts all memory. drafter: an idle drafter fits. zone: the same zone
    as the router's, and for a drafter as its verifier's.
    bound: most requests on a worker, as a multiple of the mean, before the others come first. least_bound: so many are never
    too many.
    """

    session: float = 4.0
    prefix: float = 2.0
    load: float = 1.0
    slots: float = 4.0
    queue: float = 1.0
    home: float = 0.5
    drafter: float = 1.0
    zone: float = 0.5
    bound: float = 1.25
    least_bound: int = 8

    def __post_init__(self) -> None:
        weights = {name: value for name, value in vars(self).items() if name not in ("bound", "least_bound")}
        for name, value in weights.items():
            _require(value >= 0, f"{name} is {value}; a weight must be at least 0")
        _require(self.bound >= 1, f"bound is {self.bound}; it must be at least 1")
        _above(0, least_bound=self.least_bound)


@dataclass(frozen=True)
class EjectionConfig:
    """When a worker that fails is avoided. Times in seconds.

    failures: failed requests in a row before it is ejected.
    seconds: how long the first time; twice as long each further time, up to `longest`. It comes back once it answers.
    stuck_seconds: a verifier whose step takes so long is avoided as well, and its requests go on elsewhere.
    """

    failures: int = 1
    seconds: float = 5.0
    longest: float = 60.0
    stuck_seconds: float = 60.0

    def __post_init__(self) -> None:
        _above(0, failures=self.failures, seconds=self.seconds, stuck_seconds=self.stuck_seconds)
        _require(self.longest >= self.seconds, f"longest is {self.longest}; it must be at least seconds {self.seconds}")


def _above(least: float, **settings: float) -> None:
    for name, value in settings.items():
        _require(value > least, f"{name} is {value}; it must be above {least}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
