"""Configuration of the router."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from eyas.config.checks import (
    above_zero,
    at_least,
    cert_and_key,
    not_below,
    require,
    valid_ports,
)
from eyas.config.serving import ServiceConfig

ToolParserName = Literal[
    "llama3_json",
    "hermes",
    "qwen3_coder",
    "qwen3_xml",
    "mistral",
    "openai",
    "pythonic",
    "llama4_pythonic",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "glm45",
    "glm47",
]
ReasoningParserName = Literal["deepseek_r1", "qwen3", "mistral", "openai_gptoss"]

ToolCallParser = Literal["auto", "none", ToolParserName]
ReasoningParser = Literal["auto", "none", ReasoningParserName]
SpecialTokensInContent = Literal["token", "text"]
UnknownFields = Literal["refuse", "ignore"]


@dataclass(frozen=True)
class ServedModel:
    """A model that the router serves.

    Attributes:
        name: name in requests.
        aliases: further names that requests may give. Responses name the model by `name`.
        tokenizer: folder or hub id that has its tokenizer.json.
        chat_template: file with a Jinja chat template; empty takes the tokenizer's own, if it has one.
        tool_call_parser: format of tool calls; auto finds it in the chat template, none reads no calls.
        reasoning_parser: format of reasoning; auto and none likewise.
        special_tokens_in_content: whether a special token's name in a chat's messages becomes this token ("token", as in
            vLLM) or ordinary text ("text").
    """

    name: str
    tokenizer: str
    chat_template: str = ""
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    special_tokens_in_content: SpecialTokensInContent = "token"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class HttpConfig:
    """The router's HTTP server.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        keepalive_interval_s: silence in a stream of events after which the client gets a comment.
        operations_host: address of the operations port.
        operations_port: port of /metrics, /health, /openapi.json and /docs, and of probes, without TLS; 0 takes a free one.
            null serves them on `port`. On Ray it only removes them there.
        cors_allow_origins: origins whose pages may use the API in browsers, such as https://example.org; "*" allows all, and
            at the end any port, as in http://localhost:*. Empty sends no CORS headers.
        unknown_fields: for fields that neither Eyas nor another server knows: "refuse" answers 400, "ignore" leaves them out
            and logs each name once. Misspelt names of known fields are always refused.
        playground: serve the playground at /.
    """

    host: str = "127.0.0.1"
    port: int = 0
    keepalive_interval_s: float = 5.0
    operations_host: str = "127.0.0.1"
    operations_port: int | None = None
    cors_allow_origins: tuple[str, ...] = ()
    unknown_fields: UnknownFields = "refuse"
    playground: bool = True

    def __post_init__(self) -> None:
        valid_ports(port=self.port)
        valid_ports(can_be_null=True, operations_port=self.operations_port)
        above_zero(keepalive_interval_s=self.keepalive_interval_s)


@dataclass(frozen=True)
class ApiKeysConfig:
    """Accepted API keys. Without any, requests need no key.

    Attributes:
        env: environment variable with keys, separated by commas.
        file: YAML or JSON file of hashed keys with names and limits, or a file with one key per line. Read again when it
            changes.
        max_priority: highest priority of requests, for keys that have no max_priority of their own.
        share_prefix_cache: let all tenants use one prefix cache. A client can then find out which prompts others send.
    """

    env: str = ""
    file: str = ""
    max_priority: int = 0
    share_prefix_cache: bool = False

    def __post_init__(self) -> None:
        at_least(0, max_priority=self.max_priority)


@dataclass(frozen=True)
class TlsConfig:
    """TLS of the router's gRPC and HTTP servers. Empty disables it.

    Attributes:
        cert_file: PEM file with the certificate chain.
        key_file: PEM file with its private key.
    """

    cert_file: str = ""
    key_file: str = ""

    def __post_init__(self) -> None:
        cert_and_key(self.cert_file, self.key_file)


@dataclass(frozen=True)
class LimitsConfig:
    """Upper limits of what clients of the router may hold and take. Both servers keep them.

    Attributes:
        max_request_bytes: size of an HTTP body or gRPC message.
        max_request_values: values in an HTTP body. Each token id of a prompt is one.
        max_pending_bytes: bytes that all unfinished requests may hold together: bodies, and output that is kept to be sent
            whole. An API key, or an address without keys, may hold as much as it leaves free.
        max_header_bytes: size of a request's headers or metadata.
        max_connections: connections to each server, TLS handshakes included.
        max_connections_per_peer: connections to each server from one IPv4 address or IPv6 network of 64 bits. Those beyond
            it are refused by HTTP, and closed by gRPC within a second.
        max_concurrent_streams: calls on one gRPC connection.
        header_timeout_s: time until a TLS handshake, and the headers of a request, must be complete; of a gRPC message,
            while other calls wait to be read.
        body_timeout_s: time until its body must be complete.
        idle_timeout_s: time after which a connection without a request is closed.
    """

    max_request_bytes: int = 16 * 2**20
    max_request_values: int = 2**18
    max_pending_bytes: int = 2**28
    max_header_bytes: int = 32 * 2**10
    max_connections: int = 4096
    max_connections_per_peer: int = 2048
    max_concurrent_streams: int = 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        above_zero(**vars(self))
        not_below(self, "max_pending_bytes", "max_request_bytes")


@dataclass(frozen=True)
class RoutingConfig:
    """Choice of verifier and drafter: the highest score wins. Weights multiply shares in [0, 1].

    Attributes:
        session_weight: the verifier served the session's last request.
        prefix_weight: share of the prompt in the verifier's prefix cache.
        load_weight: load of the verifier; subtracted.
        kv_weight: share of the needed KV cache tokens that are not free; subtracted.
        queue_weight: queue of the verifier; subtracted.
        hash_weight: rendezvous hash of the session, which survives a restart of the router.
        drafter_weight: a fitting drafter is idle.
        zone_weight: the verifier is in the router's zone; the drafter is in the verifier's zone.
        load_factor: highest load of a worker as a multiple of the mean, at least 1; beyond it other workers come first.
        min_bound: requests up to which load_factor does not apply.
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
        at_least(0, **{name: value for name, value in vars(self).items() if name.endswith("_weight")})
        at_least(1, load_factor=self.load_factor)
        above_zero(min_bound=self.min_bound)


@dataclass(frozen=True)
class OutlierDetectionConfig:
    """Rules by which the router avoids a failing worker. Names follow Envoy.

    Attributes:
        consecutive_failures: failed requests in a row that eject a worker.
        base_ejection_time_s: time of the first ejection; each further one takes twice as long.
        max_ejection_time_s: longest ejection.
        stuck_step_timeout_s: time after which a verifier's step counts as stuck. Its requests move to others.
    """

    consecutive_failures: int = 1
    base_ejection_time_s: float = 5.0
    max_ejection_time_s: float = 60.0
    stuck_step_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        above_zero(consecutive_failures=self.consecutive_failures, base_ejection_time_s=self.base_ejection_time_s)
        above_zero(stuck_step_timeout_s=self.stuck_step_timeout_s)
        not_below(self, "max_ejection_time_s", "base_ejection_time_s")


@dataclass(frozen=True)
class RetryConfig:
    """Rules by which a request goes on when its verifier fails. A token received restarts the count and the budget.

    Attributes:
        max_attempts: failed attempts in a row that end a request.
        budget_s: longest wait of a request in a row, for a verifier to appear or for the next attempt.
        cooldown_s: time for which a request avoids a verifier that failed it, as long as another one is left.
        initial_backoff_s: wait before the first repeated attempt on one verifier; doubles with each failed attempt, less a
            random share of up to one half. A verifier that has not failed the request is tried at once.
        max_backoff_s: longest wait between two attempts.
    """

    max_attempts: int = 5
    budget_s: float = 30.0
    cooldown_s: float = 10.0
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0

    def __post_init__(self) -> None:
        at_least(1, max_attempts=self.max_attempts)
        at_least(0, budget_s=self.budget_s, cooldown_s=self.cooldown_s)
        above_zero(initial_backoff_s=self.initial_backoff_s)
        not_below(self, "max_backoff_s", "initial_backoff_s")


@dataclass(frozen=True)
class RouterConfig(ServiceConfig):
    """The router service.

    Attributes:
        models: the served models.
        request_timeout_s: longest request without a deadline of its own.
        stall_timeout_s: longest gap between two chunks of a verifier; then the request moves to another one.
        ready_without_verifiers: answer /ready with 200 before a first verifier is found. `eyas serve` sets false.
        stuck_loop_exit_timeout_s: time after which an event loop that does not run, or an interpreter that is held, ends the
            process.
        server: gRPC server; http: HTTP server; api_keys, tls and limits apply to both.
    """

    models: tuple[ServedModel, ...]
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    ready_without_verifiers: bool = True
    stuck_loop_exit_timeout_s: float = 60.0
    http: HttpConfig = field(default_factory=HttpConfig)
    api_keys: ApiKeysConfig = field(default_factory=ApiKeysConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    outlier_detection: OutlierDetectionConfig = field(default_factory=OutlierDetectionConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)

    def __post_init__(self) -> None:
        above_zero(request_timeout_s=self.request_timeout_s, stall_timeout_s=self.stall_timeout_s)
        above_zero(stuck_loop_exit_timeout_s=self.stuck_loop_exit_timeout_s)
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        twice = next((name for name, count in Counter(names).items() if count > 1), "")
        require(not twice, f"models has the name {twice!r} twice; each model, and each alias, needs a name of its own")
