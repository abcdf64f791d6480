"""Configuration of the services: the parts that they share, then verifier and draft service."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from eyas.config.checks import above_zero, at_least, cert_and_key, require, valid_ports
from eyas.config.drafting import (
    LOOKUPS,
    NO_DRAFTS,
    DraftingConfig,
    MethodsConfig,
    TreeConfig,
    check_method,
    check_quantization,
)
from eyas.config.engine import Dtype, EngineConfig, HeadValidation

LogFormat = Literal["text", "json"]
DiscoveryKind = Literal["redis", "static", "kubernetes"]
GenerationDefaults = Literal["auto", "vllm", "none"]
DraftPlacement = Literal["auto", "service"]


@dataclass(frozen=True)
class ServerConfig:
    """gRPC server of a service.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        advertise_host: host name or address under which other services reach this one; empty takes host.
        shutdown_delay_s: time between the withdrawal from discovery and the end of new calls.
        graceful_shutdown_timeout_s: time that running calls may take after that.
        zone: availability zone; routers prefer workers in their own.
        reflection: answer gRPC server reflection, as grpcurl needs it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    shutdown_delay_s: float = 0.0
    graceful_shutdown_timeout_s: float = 30.0
    zone: str = ""
    reflection: bool = False

    def __post_init__(self) -> None:
        valid_ports(port=self.port)
        at_least(0, shutdown_delay_s=self.shutdown_delay_s, graceful_shutdown_timeout_s=self.graceful_shutdown_timeout_s)


@dataclass(frozen=True)
class PeersConfig:
    """Connections between router, verifiers and draft services. Changed files are read again without a restart.

    Attributes:
        keepalive_interval_s: time between HTTP/2 keepalive pings.
        keepalive_timeout_s: wait for the answer to a ping. Then the connection is closed, and its requests move to another
            worker.
        cert_file: PEM file with this service's certificate chain. Empty disables TLS.
        key_file: PEM file with its private key.
        ca_file: PEM file with the CA certificates that sign other services' certificates.
        tls_server_name: DNS name expected in the certificates of workers; empty expects the host of the address.
        require_client_cert: workers require client certificates signed by the CA (mTLS).
        allowed_names: names that a client certificate may have, as DNS name, URI or common name. Empty accepts every
            certificate that the CA signed.
        token_file: file with the token that all services share: workers refuse calls without it, and it signs leases. One
            token per line: the first is sent, all are accepted.
        token_env: environment variable with the token instead; commas separate several.
    """

    keepalive_interval_s: float = 2.0
    keepalive_timeout_s: float = 5.0
    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    tls_server_name: str = ""
    require_client_cert: bool = True
    allowed_names: tuple[str, ...] = ()
    token_file: str = ""
    token_env: str = ""

    def __post_init__(self) -> None:
        above_zero(keepalive_interval_s=self.keepalive_interval_s, keepalive_timeout_s=self.keepalive_timeout_s)
        cert_and_key(self.cert_file, self.key_file)
        require(not self.cert_file or bool(self.ca_file), "cert_file is set; set ca_file too")
        require(not self.tls_server_name or bool(self.ca_file), "tls_server_name is set; set ca_file too")
        require(not (self.token_file and self.token_env), "token_file and token_env are both set; set one of them")
        has_names = bool(self.cert_file and self.require_client_cert)
        require(
            not self.allowed_names or has_names,
            "allowed_names is set, but no client certificate is required; set cert_file, key_file, ca_file and "
            "require_client_cert",
        )


@dataclass(frozen=True)
class RegistryConfig:
    """The Redis registry, which holds the leases of workers and the placement of sessions.

    Attributes:
        url: URL of Redis. May be empty if discovery needs none; each router then keeps placements to itself.
        ttl_s: time after which a lease without heartbeat expires.
        heartbeat_interval_s: time between heartbeats, below ttl_s.
        prefix: first part of all keys. Deployments with different prefixes share a Redis and do not see each other.
    """

    url: str = "redis://127.0.0.1:6379/0"
    ttl_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    prefix: str = "eyas"

    def __post_init__(self) -> None:
        interval = self.heartbeat_interval_s
        require(bool(self.prefix), "prefix is empty; set the first part of all keys, such as eyas")
        require(
            0 < interval < self.ttl_s, f"heartbeat_interval_s is {interval}; it must lie between 0 and ttl_s {self.ttl_s}"
        )


@dataclass(frozen=True)
class KubernetesConfig:
    """Discovery of workers by the EndpointSlices of their Services.

    Attributes:
        api_server: URL of an API server without authentication. Empty takes the pod's service account or the kubeconfig.
        namespace: namespace of the workers. Empty takes the pod's own, or that of the kubeconfig's context.
        verifier_selector: label selector of the verifiers' EndpointSlices.
        draft_selector: label selector of the draft services' EndpointSlices.
        port_name: name of the Service's gRPC port.
        resync_interval_s: time between full lists, besides the watch.
    """

    api_server: str = ""
    namespace: str = ""
    verifier_selector: str = "app.kubernetes.io/component=verifier"
    draft_selector: str = "app.kubernetes.io/component=draft"
    port_name: str = "grpc"
    resync_interval_s: float = 30.0

    def __post_init__(self) -> None:
        above_zero(resync_interval_s=self.resync_interval_s)


@dataclass(frozen=True)
class DiscoveryConfig:
    """Source of the live workers.

    Attributes:
        kind: "redis" reads leases from the registry, "static" probes the workers listed here, "kubernetes" those in
            EndpointSlices.
        verifiers: host:port of each verifier, for "static".
        drafters: host:port of each draft service, for "static".
        probe_interval_s: time between probes of a worker.
        probe_timeout_s: wait for the answer to a probe.
        stale_after_s: time without an answer after which a worker counts as gone.
        kubernetes: settings of "kubernetes".
    """

    kind: DiscoveryKind = "redis"
    verifiers: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 2.0
    stale_after_s: float = 5.0
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def __post_init__(self) -> None:
        above_zero(probe_interval_s=self.probe_interval_s, probe_timeout_s=self.probe_timeout_s)
        above_zero(stale_after_s=self.stale_after_s)
        for address in (*self.verifiers, *self.drafters):
            host, _, port = address.rpartition(":")
            require(bool(host) and port.isdecimal(), f"address {address!r} is not host:port, such as verifier-0:50051")
        listed = bool(self.verifiers or self.drafters)
        require(not listed or self.kind == "static", f"workers are listed, but kind is {self.kind}; set it to static")


@dataclass(frozen=True)
class TelemetryConfig:
    """Metrics, traces and logs. The OTEL_* environment variables configure the export of traces.

    Attributes:
        metrics_host: address of the Prometheus endpoint /metrics.
        metrics_port: its port; 0 takes a free one, null disables the endpoint.
        step_span_ratio: share of a traced request's verify steps that get spans of their own, in [0, 1].
        log_format: "text" or "json", one line per event.
        log_prompts: write prompts and completions to logs and traces.
    """

    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    step_span_ratio: float = 0.01
    log_format: LogFormat = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        valid_ports(can_be_null=True, metrics_port=self.metrics_port)
        require(0 <= self.step_span_ratio <= 1, f"step_span_ratio is {self.step_span_ratio}; it must lie in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The parts that every service has."""

    server: ServerConfig = field(default_factory=ServerConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """Settings that verifier and draft service share.

    Attributes:
        threads: CPU threads of torch; 0 takes what `eyas.device.placement.use_threads` says.
        stuck_step_exit_timeout_s: time after which an interpreter that is held, or a verifier's step that has not ended,
            ends the process.
    """

    threads: int = 0
    stuck_step_exit_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        at_least(0, threads=self.threads)
        above_zero(stuck_step_exit_timeout_s=self.stuck_step_exit_timeout_s)
        require(
            not self.peers.ca_file or bool(self.peers.cert_file),
            "peers.ca_file is set without a certificate, so this worker would serve without TLS; "
            "set peers.cert_file and peers.key_file",
        )


# Verifier


@dataclass(frozen=True)
class DraftClientConfig:
    """The verifier's client of draft services.

    Attributes:
        draft_timeout_s: longest wait of a step for its trees. It drops later ones and decodes plainly.
        breaker_max_failures: failed or late replies in a row that open the circuit breaker.
        breaker_reset_s: time until the open circuit breaker tries again. Doubles with each failed try, up to 10 s.
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


@dataclass(frozen=True)
class VerifierConfig(WorkerConfig):
    """The verifier service.

    Attributes:
        served_model_name: name in requests.
        model: folder or hub id of the target.
        draft_model: folder or hub id of the draft head, which fuses the features that the verifier sends.
        method: drafting method that needs these features, such as "eagle3". Empty takes the one that draft_model is for, and
            "none", which accepts no drafts, without one. With any other method, drafters that need no features work too.
        draft_placement: "auto" runs lookups, which need no model, in the verifier. "service" takes their drafts from
            draft services too, which other methods always use.
        methods: settings of the lookups that run in the verifier.
        validate_head: "auto" tests at startup that the head's guesses are better than chance, and rejects it otherwise.
        dtype: of the weights. "auto" takes the checkpoint's own on CUDA, and float32 on a CPU. There, passes over weights of
            half precision compute in float32 unless the processor has matrix units for them; with AMX and one thread, rows
            are rounded to bfloat16.
        device: "auto" takes CUDA if there is a GPU.
        tree: shape of draft trees; drafter and verifier should agree.
        max_pending_bytes: output that routers have not read yet, of all requests together. A request may hold as many bytes
            as are free. One that held more is sent again, from the token that its client has reached.
        generation_config: where requests get the sampling parameters that they do not name. "auto" takes the model's
            generation_config.json; "vllm" and "none" take neutral values.
        stuck_step_timeout_s: time after which a step that has not ended fails all requests and makes health NOT_SERVING.
    """

    served_model_name: str
    model: str
    draft_model: str = ""
    method: str = ""
    draft_placement: DraftPlacement = "auto"
    validate_head: HeadValidation = "auto"
    dtype: Dtype = "auto"
    device: str = "auto"
    tree: TreeConfig = field(default_factory=TreeConfig)
    methods: MethodsConfig = field(default_factory=MethodsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    draft_client: DraftClientConfig = field(default_factory=DraftClientConfig)
    max_pending_bytes: int = 2**28
    generation_config: GenerationDefaults = "auto"
    stuck_step_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_method(self.method, self.draft_model)
        require(
            not self.drafts_itself or self.engine.acceptance == "match",
            f"engine.acceptance is rejection, but {self.method} cannot sample drafts; set engine.acceptance to match",
        )
        above_zero(max_pending_bytes=self.max_pending_bytes)
        above_zero(stuck_step_timeout_s=self.stuck_step_timeout_s)
        at_least(self.stuck_step_timeout_s, stuck_step_exit_timeout_s=self.stuck_step_exit_timeout_s)

    @property
    def drafts_itself(self) -> bool:
        """True if the method's drafter runs in the verifier."""
        return self.draft_placement == "auto" and not set(self.method.split("+")) - LOOKUPS


# Draft service


@dataclass(frozen=True)
class DraftedModel:
    """A target and its drafter. The limits of `drafting` apply to each drafter by itself.

    Attributes:
        served_model_name: name of the target in requests.
        model: folder or hub id of the target; the drafter reads its config and embeddings.
        draft_model: folder or hub id of the draft head or model; empty for a method that loads none.
        method: drafting method, such as "eagle3" or "eagle3+prompt_lookup". Empty takes the one that draft_model is for.
    """

    served_model_name: str
    model: str
    draft_model: str = ""
    method: str = ""
    dtype: Dtype = "auto"
    device: str = "auto"
    tree: TreeConfig = field(default_factory=TreeConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    methods: MethodsConfig = field(default_factory=MethodsConfig)

    def __post_init__(self) -> None:
        check_method(self.method, self.draft_model)
        nothing = not (self.method or self.draft_model) or self.method == NO_DRAFTS
        if self.method:
            check_quantization(self.method, self.drafting.quantization)
        require(not nothing, f"nothing drafts for {self.served_model_name}; set draft_model, or a method that needs none")


@dataclass(frozen=True)
class DraftQueueConfig:
    """Limits of a drafter's queue. What exceeds those of a verifier's stream is refused and decodes without drafts.

    Attributes:
        max_sessions: most sessions of a stream, and commits in a request.
        max_pending_tokens: most new tokens that wait in the queue of a stream.
        max_batch_size: most sessions in a batch. Batches take from all streams in turn.
        max_batch_tokens: new tokens after which a batch is full.
    """

    max_sessions: int = 1024
    max_pending_tokens: int = 262144
    max_batch_size: int = 256
    max_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        at_least(1, **vars(self))


@dataclass(frozen=True)
class DraftConfig(DraftedModel, WorkerConfig):
    """The draft service: the fields of DraftedModel for its first model, and those of the service.

    Attributes:
        additional_models: further models that the service drafts for.
        queue: limits of each drafter's queue.
    """

    additional_models: tuple[DraftedModel, ...] = ()
    queue: DraftQueueConfig = field(default_factory=DraftQueueConfig)

    def __post_init__(self) -> None:
        DraftedModel.__post_init__(self)
        WorkerConfig.__post_init__(self)

    @property
    def models(self) -> tuple[DraftedModel, ...]:
        """Return all models that the service drafts for."""
        first = {setting.name: getattr(self, setting.name) for setting in fields(DraftedModel)}
        return (DraftedModel(**first), *self.additional_models)
