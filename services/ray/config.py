"""Settings of an application on Ray Serve: those of its services, and of their pools."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from eyas.config import DraftConfig, RouterConfig, ServerConfig, VerifierConfig, validated
from eyas.config.checks import at_least, not_below, require
from eyas.errors import ConfigError
from eyas.services.ray.autoscaling import ScalingConfig

ConfigT = TypeVar("ConfigT", RouterConfig, VerifierConfig, DraftConfig)

# Seconds that a replica gets after its service has drained, before Serve kills it.
_GRACE_S = 15.0


@dataclass(frozen=True)
class PoolConfig:
    """Number of replicas of a service, and the share of its node that each gets.

    Attributes:
        look_back_period_s: reports of the replicas are averaged over it.
        scaling: when the pool changes its size.
        num_cpus, num_gpus, resources: what Ray reserves for each replica. num_gpus 0 reserves what the service needs: one
            GPU for each rank on CUDA, none elsewhere; with device auto it must be set.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    look_back_period_s: float = 5.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)

    def __post_init__(self) -> None:
        at_least(1, min_replicas=self.min_replicas)
        not_below(self, "max_replicas", "min_replicas")
        at_least(0, look_back_period_s=self.look_back_period_s, num_cpus=self.num_cpus, num_gpus=self.num_gpus)


@dataclass(frozen=True)
class RouterPoolConfig(PoolConfig):
    """Pool of routers.

    Attributes:
        max_requests: of one full router; twice as many are let in, the rest waits in Serve's proxies.
    """

    max_requests: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, max_requests=self.max_requests)


@dataclass(frozen=True)
class DraftPoolConfig(PoolConfig):
    """Pool of draft services.

    Attributes:
        max_late_ratio: share of replies later than draft_client.draft_timeout_s at which drafters count as full.
    """

    max_late_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.max_late_ratio <= 1, f"max_late_ratio is {self.max_late_ratio}; it must lie in (0, 1]")


@dataclass(frozen=True)
class PoolsConfig:
    """The pools of an application."""

    router: RouterPoolConfig = field(default_factory=RouterPoolConfig)
    verifier: PoolConfig = field(default_factory=PoolConfig)
    draft: DraftPoolConfig = field(default_factory=DraftPoolConfig)


@dataclass(frozen=True)
class EnvironmentConfig:
    """Names of environment variables that replicas read on their nodes; empty reads none.

    Attributes:
        registry_url: replaces registry.url, which may hold a password.
        zone: replaces server.zone.
    """

    registry_url: str = ""
    zone: str = ""


@dataclass(frozen=True)
class RayConfig:
    """An application: the settings of router, verifier and draft service; without draft all requests decode plainly.

    Serve decides where services listen: host, port and advertise_host of their servers, and the router's HTTP address, are
    ignored. environment: what replicas read on their nodes.
    """

    router: RouterConfig
    verifier: VerifierConfig
    draft: DraftConfig | None = None
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    def __post_init__(self) -> None:
        require(
            not self.router.tls.cert_file,
            "router.tls has no effect on Ray, whose proxies terminate TLS; give Serve's http_options the certificate",
        )
        for name, config in (("router", self.router), ("verifier", self.verifier), ("draft", self.draft)):
            kind = config.discovery.kind if config else "redis"
            require(
                kind == "redis",
                f"{name}.discovery.kind is {kind}; on Ray workers are found by their leases; set it to redis",
            )


def read(args: Mapping[str, Any]) -> RayConfig:
    """Return the settings in the args of an application. Raises ConfigError, also for a missing block."""
    for name in ("router", "verifier"):
        if not isinstance(args.get(name), Mapping):
            raise ConfigError(f"args has no settings for the {name}; give it a block {name}: as its config file has it")
    return validated(RayConfig, args, "args")


def on_node(config: ConfigT, names: EnvironmentConfig, host: str, environment: Mapping[str, str] = os.environ) -> ConfigT:
    """Return a service's settings for a replica on a node with the address `host`: with free ports, so that replicas share
    nodes.

    Raises ConfigError for a named variable that is not set there.
    """
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
    """Return the seconds that Serve must wait for a replica that it stops."""
    return math.ceil(config.shutdown_delay_s + config.graceful_shutdown_timeout_s + _GRACE_S)


def num_gpus(pool: PoolConfig, device: str, num_ranks: int = 1) -> float:
    """Return the GPUs that Ray reserves for a replica."""
    return pool.num_gpus or (float(num_ranks) if device.startswith("cuda") else 0.0)
