"""Settings of every part as frozen values. A value out of range raises ConfigError wherever it is constructed.

Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from eyas.config.checks import above_zero, at_least, require
from eyas.config.doors import HttpConfig, KeysConfig, TlsConfig
from eyas.config.drafting import EagleConfig, TreeConfig
from eyas.config.fleet import DiscoveryConfig, EjectionConfig, PlacementConfig
from eyas.config.methods import MethodsConfig
from eyas.config.peers import DraftLinkConfig, PeersConfig
from eyas.config.telemetry import TelemetryConfig

Dtype = Literal["float32", "bfloat16", "float16"]
Rule = Literal["match", "rejection"]
# YAML reads "off" as false.
Probe = Literal["auto", "never"]
BudgetPolicy = Literal["fixed", "adaptive"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    num_slots: token slots of KV cache; a request needs prompt + max_tokens of them at most. 0 takes what memory allows.
    memory_fraction: share of the free memory that num_slots 0 takes, once the weights are loaded.
    max_running: most sequences in a step. max_waiting: most requests in the queue besides those that may start at once.
    step_tokens: most prompt tokens that one step prefills.
    step_rows: most tree nodes that one step verifies; a sequence decodes plainly where its share would be less than two.
    context_length: most tokens of prompt and output together; 0 takes the model's own limit.
    deterministic: each sequence goes through the target by itself, in passes of exactly as many rows as a tree may have
    nodes, so that a token's logits depend on the tokens before it alone. Slow; see docs/equality.md.
    cuda_graphs: capture forward passes as CUDA graphs at start; without effect on other devices.
    rule: how drafts are accepted. "match" gives the tokens of plain decoding; "rejection" gives their law only, above
    temperature 0, and takes drafts that were drawn from the drafter's law.
    budget: how large draft trees are. "fixed" takes the largest that step_rows leaves each sequence; "adaptive" those with
    the most tokens a second, down to none, as far as measured steps tell. No output depends on it.
    prefix_cache: keep what finished requests computed for others that begin with the same tokens.
    session_seconds: how long a conversation's slots are kept before those of others after its last turn.
    ageing_seconds: how much waiting outweighs one step of priority.
    tensor_parallel: processes that share the target's weights and KV cache; it must divide the model's attention heads, and
    divide its key-value heads or be a multiple of them.
    """

    num_slots: int = 0
    memory_fraction: float = 0.85
    max_running: int = 32
    max_waiting: int = 1024
    step_tokens: int = 512
    step_rows: int = 1024
    context_length: int = 0
    deterministic: bool = False
    cuda_graphs: bool = True
    rule: Rule = "match"
    budget: BudgetPolicy = "fixed"
    prefix_cache: bool = True
    session_seconds: float = 300.0
    ageing_seconds: float = 10.0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        require(self.rule in get_args(Rule), f"rule is {self.rule!r}; it must be one of {', '.join(get_args(Rule))}")
        known = ", ".join(get_args(BudgetPolicy))
        require(self.budget in get_args(BudgetPolicy), f"budget is {self.budget!r}; it must be one of {known}")
        at_least(1, max_running=self.max_running, step_tokens=self.step_tokens, step_rows=self.step_rows)
        at_least(1, tensor_parallel=self.tensor_parallel)
        at_least(0, num_slots=self.num_slots, max_waiting=self.max_waiting, context_length=self.context_length)
        at_least(0, session_seconds=self.session_seconds, ageing_seconds=self.ageing_seconds)
        require(0 < self.memory_fraction <= 1, f"memory_fraction is {self.memory_fraction}; it must lie in (0, 1]")


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
    probe: Probe = "auto"
    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int = 0
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    link: DraftLinkConfig = field(default_factory=DraftLinkConfig)
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
    eagle: EagleConfig = field(default_factory=EagleConfig)
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
    eagle: EagleConfig = field(default_factory=EagleConfig)
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
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    ejection: EjectionConfig = field(default_factory=EjectionConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        above_zero(request_timeout=self.request_timeout, stall_timeout=self.stall_timeout)
