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
    step_span_ratio: share of the rounds of a traced request that get spans of their own, on verifier and drafter.
    log_format: "text" or "json", one line per event. log_prompts: let prompts and their answers into logs and traces.
    """

    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    step_span_ratio: float = 0.01
    log_format: LogFormat = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port is {self.metrics_port}; it must lie in [0, 65535], or be null for no metrics")
        if not 0 <= self.step_span_ratio <= 1:
            raise ConfigError(f"step_span_ratio is {self.step_span_ratio}; it must lie in [0, 1]")
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

    cert_file: str = ""
    key_file: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("cert_file and key_file go together; set both or none")


@dataclass(frozen=True)
class PeersConfig:
    """How router, verifiers and drafters talk to one another. Times in seconds.

    keepalive_interval_s: how often whoever dials asks for a sign of life. keepalive_timeout_s: how long for. A peer that hangs, or that
    the network has swallowed, is given up after both together; what it was doing goes on elsewhere.
    cert_file, key_file: PEM files with the chain that this service shows its peers, and its key. ca_file: PEM file with the
    certificates of those who sign its peers'. All three are read again once they have changed. Empty speaks without TLS.
    tls_server_name: the DNS name that every worker's certificate is for, since addresses change; empty takes the host that is dialled.
    require_client_cert: a worker serves only peers that show a certificate signed by the CA.
    """

    keepalive_interval_s: float = 2.0
    keepalive_timeout_s: float = 5.0
    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    tls_server_name: str = ""
    require_client_cert: bool = True

    def __post_init__(self) -> None:
        above_zero(keepalive_interval_s=self.keepalive_interval_s, keepalive_timeout_s=self.keepalive_timeout_s)
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("cert_file and key_file go together; set both or none")
        require(not self.cert_file or bool(self.ca_file), "cert_file is set; set ca_file too, which peers are verified with")
        require(
            not self.tls_server_name or bool(self.ca_file), "tls_server_name is set; set ca_file too, which peers are verified with"
        )

    def check_worker(self) -> None:
        """Raises ConfigError where a worker would dial with TLS and be dialled without."""
        message = "peers.ca_file is set without a certificate, so this worker would serve without TLS; "
        require(bool(self.cert_file) or not self.ca_file, message + "set peers.cert_file and peers.key_file")


@dataclass(frozen=True)
class DraftClientConfig:
    """How long a verifier waits for drafts, in seconds.

    draft_timeout_s: longest wait for the trees of one step; later ones are dropped and the rows decode plainly.
    breaker_max_failures: failed or late rounds in a row before the drafter is left alone.
    breaker_reset_s: how long the drafter is left alone at first; twice as long after each attempt that fails, up to 10 s.
    max_message_tokens: most feature rows in one message.
    """

    draft_timeout_s: float = 0.1
    breaker_max_failures: int = 3
    breaker_reset_s: float = 0.5
    max_message_tokens: int = 512

    def __post_init__(self) -> None:
        above_zero(draft_timeout_s=self.draft_timeout_s, breaker_reset_s=self.breaker_reset_s)
        at_least(1, breaker_max_failures=self.breaker_max_failures)
        at_least(2, max_message_tokens=self.max_message_tokens)


DiscoveryKind = Literal["redis", "static", "kubernetes"]


@dataclass(frozen=True)
class KubernetesConfig:
    """How workers are found by their Services' EndpointSlices.

    api_server: URL of one that asks for no credentials; empty takes the pod's service account, else the kubeconfig.
    namespace: empty takes the pod's own, else that of the kubeconfig's context.
    verifier_selector, draft_selector: label selectors of the slices; these bear the labels of their Service.
    port_name: the Service's port that speaks gRPC.
    list_interval_s: seconds after which everything is listed anew, whatever the watch says.
    """

    api_server: str = ""
    namespace: str = ""
    verifier_selector: str = "app.kubernetes.io/component=verifier"
    draft_selector: str = "app.kubernetes.io/component=draft"
    port_name: str = "grpc"
    list_interval_s: float = 30.0

    def __post_init__(self) -> None:
        _above(0, list_interval_s=self.list_interval_s)


@dataclass(frozen=True)
class DiscoveryConfig:
    """How live workers are found. Times in seconds.

    kind: "redis" reads the leases that workers keep in the registry; "static" asks the workers named here; "kubernetes" asks
    those that EndpointSlices name.
    verifiers, drafters: host:port of each worker, for "static".
    probe_interval_s: how often a worker is asked for its state, where it publishes no lease. probe_timeout_s: how long for.
    stale_after_s: how long a worker may leave that unanswered and still count as live.
    """

    kind: DiscoveryKind = "redis"
    verifiers: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 2.0
    stale_after_s: float = 5.0
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def __post_init__(self) -> None:
        kinds = get_args(DiscoveryKind)
        _require(self.kind in kinds, f"kind is {self.kind!r}; it must be one of {', '.join(kinds)}")
        _above(
            0, probe_interval_s=self.probe_interval_s, probe_timeout_s=self.probe_timeout_s, stale_after_s=self.stale_after_s
        )
        for address in (*self.verifiers, *self.drafters):
            host, _, port = address.rpartition(":")
            _require(bool(host) and port.isdecimal(), f"address {address!r} is not host:port, such as verifier-0:50051")
        named = bool(self.verifiers or self.drafters)
        _require(not named or self.kind == "static", f"workers are named, but kind is {self.kind}; set it to static")


@dataclass(frozen=True)
class RoutingConfig:
    """What makes a verifier, and its drafter, the right one for a request: weights of a score, each with a share in [0, 1].

    session_weight: where the session's last request ran. prefix_weight: share of the prompt that is cached there. load_weight: requests there,
    taken off. kv_weight: share of the needed token slots that are missing, taken off. queue_weight: requests waiting there, taken off.
    hash_weight: where a hash of the session points, which outlasts all memory. drafter_weight: an idle drafter fits. zone_weight: the same zone
    as the router's, and for a drafter as its verifier's.
    load_factor: most requests on a worker, as a multiple of the mean, before the others come first. min_bound: so many are never
    too many.
    """

    session_weight: float = 4.0
    prefix_weight: float = 2.0
    load_weight: float = 1.0
    kv_weight: float = 4.0
    queue_weight: float = 1.0
    hash_weight: float = 0.5
    drafter_weight: float = 1.0
    zone_weight: float = 0.5
    load_factor: float = 1.25
    min_bound: int = 8

    def __post_init__(self) -> None:
        weights = {name: value for name, value in vars(self).items() if name not in ("load_factor", "min_bound")}
        for name, value in weights.items():
            _require(value >= 0, f"{name} is {value}; a weight must be at least 0")
        _require(self.load_factor >= 1, f"load_factor is {self.load_factor}; it must be at least 1")
        _above(0, min_bound=self.min_bound)


@dataclass(frozen=True)
class OutlierDetectionConfig:
    """When a worker that fails is avoided. Times in seconds.

    consecutive_failures: failed requests in a row before it is ejected.
    base_ejection_time_s: how long the first time; twice as long each further time, up to `longest`. It comes back once it answers.
    stuck_step_timeout_s: a verifier whose step takes so long is avoided as well, and its requests go on elsewhere.
    """

    consecutive_failures: int = 1
    base_ejection_time_s: float = 5.0
    max_ejection_time_s: float = 60.0
    stuck_step_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _above(
            0,
            consecutive_failures=self.consecutive_failures,
            base_ejection_time_s=self.base_ejection_time_s,
            stuck_step_timeout_s=self.stuck_step_timeout_s,
        )
        _require(
            self.max_ejection_time_s >= self.base_ejection_time_s,
            f"max_ejection_time_s is {self.max_ejection_time_s}; it must be at least seconds {self.base_ejection_time_s}",
        )


def _above(least: float, **settings: float) -> None:
    for name, value in settings.items():
        _require(value > least, f"{name} is {value}; it must be above {least}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class ServerConfig:
    """Where a service listens and how it tells others. port 0 takes a free one; advertise defaults to host.

    shutdown_delay_s: how long a service that stops still takes calls after it has told others to send none.
    graceful_shutdown_timeout_s: how long running calls may go on after that.
    zone: where this machine is, in the cluster's own words; workers of the same zone are preferred. May be empty.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    shutdown_delay_s: float = 0.0
    graceful_shutdown_timeout_s: float = 30.0
    zone: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port is {self.port}; it must lie in [0, 65535]")
        at_least(0, shutdown_delay_s=self.shutdown_delay_s, graceful_shutdown_timeout_s=self.graceful_shutdown_timeout_s)


@dataclass(frozen=True)
class RegistryConfig:
    """Where leases and placements are kept, and how long leases live without a heartbeat, in seconds.

    url: may be empty where discovery needs no registry; sessions are then remembered by each router alone.
    """

    url: str = "redis://127.0.0.1:6379/0"
    ttl_s: float = 5.0
    heartbeat_interval_s: float = 1.0

    def __post_init__(self) -> None:
        require(
            0 < self.heartbeat_interval_s < self.ttl_s,
            f"heartbeat_interval_s is {self.heartbeat_interval_s}; it must lie between 0 and ttl {self.ttl_s}",
        )


@dataclass(frozen=True)
class VerifierConfig:
    """The verifier service.

    method: the method that it collects features for; "eagle3" where it is left out and a head is named, else "none", which
    takes no drafts. Drafters that need no features are taken with any other. draft_model: the checkpoint that makes the features.
    validate_head: "auto" tries out at start how the head is to be read, and refuses one that guesses no better than chance.
    """

    served_model_name: str
    model: str
    draft_model: str = ""
    method: str = ""
    validate_head: HeadValidation = "auto"
    dtype: Dtype = "auto"
    device: str = "auto"
    threads: int = 0
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    draft_client: DraftClientConfig = field(default_factory=DraftClientConfig)
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
    """A target and how it is drafted for. served_model_name: the name it is served under.

    model: where the target's embeddings and config are read from. draft_model: what the drafter loads. eagle.num_slots or
    eagle.memory limits each by itself.
    """

    served_model_name: str
    model: str
    draft_model: str = ""
    method: str = "eagle3"
    dtype: Dtype = "auto"
    device: str = "auto"
    tree: TreeConfig = field(default_factory=TreeConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    methods: MethodsConfig = field(default_factory=MethodsConfig)


@dataclass(frozen=True)
class DraftConfig:
    """The draft service. model to methods: as in DraftedModel; additional_models: what it drafts for besides."""

    served_model_name: str
    model: str
    draft_model: str = ""
    method: str = "eagle3"
    dtype: Dtype = "auto"
    device: str = "auto"
    threads: int = 0
    tree: TreeConfig = field(default_factory=TreeConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    methods: MethodsConfig = field(default_factory=MethodsConfig)
    additional_models: tuple[DraftedModel, ...] = ()
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
        return (DraftedModel(**own), *self.additional_models)


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

    request_timeout_s: longest life of a request without a deadline of its own.
    stall_timeout_s: longest silence of a verifier that has begun to answer, before the request moves to another.
    api_keys, tls: of both doors, gRPC (server) and HTTP.
    """

    models: tuple[ServedModel, ...]
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    server: ServerConfig = field(default_factory=ServerConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    api_keys: KeysConfig = field(default_factory=KeysConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    outlier_detection: OutlierDetectionConfig = field(default_factory=OutlierDetectionConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        above_zero(request_timeout_s=self.request_timeout_s, stall_timeout_s=self.stall_timeout_s)
