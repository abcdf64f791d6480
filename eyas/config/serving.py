"""How a service tells of itself: given as settings, checked where they are constructed. Knows no files.

Settings of the router's doors as frozen values: where HTTP listens, who may ask, what it is encrypted with.

Knows no files.

Settings of how the services of one deployment meet, as frozen values: signs of life, encryption, patience with drafters.

Knows no files.

Settings of how workers are found, chosen and avoided. A value out of range raises ConfigError wherever it is constructed.

Knows no files and no services.

Settings of every part as frozen values. A value out of range raises ConfigError wherever it is constructed.

Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from eyas.config.drafting import DraftingConfig, MethodsConfig, TreeConfig
from eyas.config.engine import Dtype, EngineConfig, HeadValidation
from eyas.config.loader import above_zero, at_least, require
from eyas.errors import ConfigError

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class TelemetryConfig:
    """Metrics, traces and logs of one service. Where OTLP goes to is said by the usual OTEL_* environment variables.

    metrics_host, metrics_port: where Prometheus finds /metrics; port 0 takes a free one, none serves nothing.
    round_span_ratio: share of the rounds of a traced request that get spans of their own, on verifier and drafter.
    log_format: "text" or "json", one line per event. log_prompts: let prompts and their answers into logs and traces.
    """

    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    round_span_ratio: float = 0.01
    log_format: LogFormat = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port is {self.metrics_port}; it must lie in [0, 65535], or be null for no metrics")
        if not 0 <= self.round_span_ratio <= 1:
            raise ConfigError(f"round_span_ratio is {self.round_span_ratio}; it must lie in [0, 1]")
        if self.log_format not in get_args(LogFormat):
            raise ConfigError(f"log_format is {self.log_format!r}; it must be one of {', '.join(get_args(LogFormat))}")


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
class DraftClientConfig:
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
class RoutingConfig:
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
class OutlierDetectionConfig:
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


@dataclass(frozen=True)
class ServerConfig:
    """Where a service listens and how it tells others. port 0 takes a free one; advertise defaults to host.

    linger_seconds: how long a service that stops still takes calls after it has told others to send none.
    drain_seconds: how long running calls may go on after that.
    zone: where this machine is, in the cluster's own words; workers of the same zone are preferred. May be empty.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    linger_seconds: float = 0.0
    drain_seconds: float = 30.0
    zone: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port is {self.port}; it must lie in [0, 65535]")
        at_least(0, linger_seconds=self.linger_seconds, drain_seconds=self.drain_seconds)


@dataclass(frozen=True)
class RegistryConfig:
    """Where leases and placements are kept, and how long leases live without a heartbeat, in seconds.

    url: may be empty where discovery needs no registry; sessions are then remembered by each router alone.
    """

    url: str = "redis://127.0.0.1:6379/0"
    ttl: float = 5.0
    heartbeat: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.heartbeat < self.ttl, f"heartbeat is {self.heartbeat}; it must lie between 0 and ttl {self.ttl}")


@dataclass(frozen=True)
class VerifierConfig:
    """The verifier service.

    drafter: the method that it collects features for; "eagle3" where it is left out and a head is named, else "none", which
    takes no drafts. Drafters that need no features are taken with any other. head: the checkpoint that makes the features.
    probe: "auto" tries out at start how the head is to be read, and refuses one that guesses no better than chance.
    """

    model: str
    target: str
    head: str = ""
    drafter: str = ""
    probe: HeadValidation = "auto"
    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int = 0
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    link: DraftClientConfig = field(default_factory=DraftClientConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        at_least(0, threads=self.threads)
        self.peers.check_worker()


@dataclass(frozen=True)
class DraftedModel:
    """A target and how it is drafted for. model: the name it is served under.

    target: where the target's embeddings and config are read from. head: what the drafter loads. eagle.num_slots or
    eagle.memory limits each by itself.
    """

    model: str
    target: str
    head: str = ""
    drafter: str = "eagle3"
    dtype: Dtype = "float32"
    device: str = "cpu"
    tree: TreeConfig = field(default_factory=TreeConfig)
    eagle: DraftingConfig = field(default_factory=DraftingConfig)
    methods: MethodsConfig = field(default_factory=MethodsConfig)


@dataclass(frozen=True)
class DraftConfig:
    """The draft service. model to methods: as in DraftedModel; more: what it drafts for besides."""

    model: str
    target: str
    head: str = ""
    drafter: str = "eagle3"
    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int = 0
    tree: TreeConfig = field(default_factory=TreeConfig)
    eagle: DraftingConfig = field(default_factory=DraftingConfig)
    methods: MethodsConfig = field(default_factory=MethodsConfig)
    more: tuple[DraftedModel, ...] = ()
    server: ServerConfig = field(default_factory=ServerConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        at_least(0, threads=self.threads)
        self.peers.check_worker()

    @property
    def drafted(self) -> tuple[DraftedModel, ...]:
        """All that it drafts for."""
        own = {setting.name: getattr(self, setting.name) for setting in fields(DraftedModel)}
        return (DraftedModel(**own), *self.more)


@dataclass(frozen=True)
class ServedModel:
    """A model that the router takes requests for. tokenizer: folder or hub id that holds its tokenizer.json.

    chat_template: file with a chat template in Jinja; empty takes the one that lies with the tokenizer, if there is one.
    """

    name: str
    tokenizer: str
    chat_template: str = ""


@dataclass(frozen=True)
class RouterConfig:
    """The router service. Times in seconds.

    request_timeout: longest life of a request without a deadline of its own.
    stall_timeout: longest silence of a verifier that has begun to answer, before the request moves to another.
    keys, tls: of both doors, gRPC (server) and HTTP.
    """

    models: tuple[ServedModel, ...]
    request_timeout: float = 600.0
    stall_timeout: float = 60.0
    server: ServerConfig = field(default_factory=ServerConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    placement: RoutingConfig = field(default_factory=RoutingConfig)
    ejection: OutlierDetectionConfig = field(default_factory=OutlierDetectionConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        above_zero(request_timeout=self.request_timeout, stall_timeout=self.stall_timeout)
