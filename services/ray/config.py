"""Settings of an application on Ray Serve: those of its services, and of their pools. Knows no Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from eyas.config import DraftConfig, RouterConfig, ServerConfig, VerifierConfig, validated
from eyas.config.loader import at_least, require
from eyas.errors import ConfigError
from eyas.services.ray.autoscaling import Damping

ConfigT = TypeVar("ConfigT", RouterConfig, VerifierConfig, DraftConfig)

# What a replica may need beyond the drain of its service until Serve may kill it, in seconds.
_GRACE = 15.0


@dataclass(frozen=True)
class PoolConfig:
    """How many replicas a service has and what each gets of its node.

    window_seconds: signals are means over so much of the past. num_cpus, num_gpus, resources: what Ray sets aside for each.
    num_gpus 0 takes what the service needs: one GPU for each rank on CUDA, none elsewhere; with device auto it must be set.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    window_seconds: float = 5.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    damping: Damping = field(default_factory=Damping)

    def __post_init__(self) -> None:
        at_least(1, min_replicas=self.min_replicas)
        require(
            self.min_replicas <= self.max_replicas,
            f"max_replicas is {self.max_replicas}; it must be at least min_replicas {self.min_replicas}",
        )
        at_least(0, window_seconds=self.window_seconds, num_cpus=self.num_cpus, num_gpus=self.num_gpus)


@dataclass(frozen=True)
class RouterPoolConfig(PoolConfig):
    """requests: how many a router carries at a time; up to twice as many are let in, the rest waits in Serve's proxies."""

    requests: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, requests=self.requests)


@dataclass(frozen=True)
class DraftPoolConfig(PoolConfig):
    """late_share: the share of answers later than the verifiers wait (draft_client.draft_timeout_s) at which drafters count as full."""

    late_share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.late_share <= 1, f"late_share is {self.late_share}; it must lie in (0, 1]")


@dataclass(frozen=True)
class PoolsConfig:
    """The pools of an application."""

    router: RouterPoolConfig = field(default_factory=RouterPoolConfig)
    verifier: PoolConfig = field(default_factory=PoolConfig)
    draft: DraftPoolConfig = field(default_factory=DraftPoolConfig)


@dataclass(frozen=True)
class EnvironmentConfig:
    """Names of environment variables that replicas read on their nodes; empty reads none.

    registry_url: in place of registry.url, which may hold a password. zone: in place of server.zone.
    """

    registry_url: str = ""
    zone: str = ""


@dataclass(frozen=True)
class RayConfig:
    """An application: router, verifier and draft as the services have them; without draft all requests decode plainly.

    Where services listen is Serve's to say: host, port and advertise of their servers are not looked at, nor is the HTTP
    door's place. environment: what replicas know of their nodes.
    """

    router: RouterConfig
    verifier: VerifierConfig
    draft: DraftConfig | None = None
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    def __post_init__(self) -> None:
        require(
            not self.router.tls.cert_file,
            "router.tls is not for Ray, whose proxies are the doors; give Serve's http_options the certificate",
        )
        for name, config in (("router", self.router), ("verifier", self.verifier), ("draft", self.draft)):
            kind = config.discovery.kind if config else "redis"
            require(kind == "redis", f"{name}.discovery.kind is {kind}; on Ray workers are found by their leases: redis")


def read(args: Mapping[str, Any]) -> RayConfig:
    """The settings in the args of an application. Raises ConfigError, also for blocks that are missing or no mappings."""
    for name in ("router", "verifier"):
        if not isinstance(args.get(name), Mapping):
            raise ConfigError(f"args has no settings for the {name}; give it a block {name}: as its config file has it")
    return validated(RayConfig, args, "args")


def on_node(config: ConfigT, names: EnvironmentConfig, host: str, environment: Mapping[str, str] = os.environ) -> ConfigT:
    """A service's settings for a replica on a node with the address `host`: on free ports, so that replicas can share the
    node. Raises ConfigError for a variable that is named and not set there."""
    for name in (names.registry_url, names.zone):
        require(not name or name in environment, f"environment names {name}, which is not set on the node {host}")
    zone = environment[names.zone] if names.zone else config.server.zone
    url = environment[names.registry_url] if names.registry_url else config.registry.url
    port = None if config.telemetry.metrics_port is None else 0
    return replace(
        config,
        server=replace(config.server, host=host, port=0, advertise_host="", zone=zone),
        registry=replace(config.registry, url=url),
        telemetry=replace(config.telemetry, metrics_port=port),
    )


def graceful_shutdown_timeout_s(config: ServerConfig) -> int:
    """How long Serve must wait for a replica that it stops."""
    return math.ceil(config.shutdown_delay_s + config.graceful_shutdown_timeout_s + _GRACE)


def num_gpus(pool: PoolConfig, device: str, num_ranks: int = 1) -> float:
    """What Ray sets aside for a replica."""
    return pool.num_gpus or (float(num_ranks) if device.startswith("cuda") else 0.0)
