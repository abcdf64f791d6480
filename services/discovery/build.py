"""Which way of discovery the settings ask for. Knows no workers."""

from __future__ import annotations

from eyas.config import DiscoveryConfig, RegistryConfig
from eyas.rpc.channel import Peers
from eyas.services.discovery.base import Discovery
from eyas.services.discovery.probing import ProbedDiscovery, StaticEndpoints
from eyas.services.discovery.registry import Registry


def lease_registry(discovery: DiscoveryConfig, registry: RegistryConfig) -> Registry | None:
    """Where a worker publishes its lease; None where it is found without one. Raises ConfigError for a bad URL."""
    return Registry(registry) if discovery.kind == "redis" else None


def session_registry(discovery: DiscoveryConfig, registry: RegistryConfig) -> Registry | None:
    """Where a router keeps placements; None where it keeps them to itself. Raises ConfigError for a bad URL."""
    return Registry(registry) if registry.url or discovery.kind == "redis" else None


def build_discovery(config: DiscoveryConfig, registry: Registry | None, peers: Peers | None = None) -> Discovery:
    """The live workers; by `registry` where leases say who they are, dialled as `peers` says where they are asked."""
    peers = peers or Peers()
    if config.kind == "static":
        return ProbedDiscovery(StaticEndpoints(config), config, peers)
    if config.kind == "kubernetes":
        from eyas.services.discovery.kubernetes import SliceEndpoints

        return ProbedDiscovery(SliceEndpoints(config.kubernetes), config, peers)
    assert registry is not None, "leases are kept in a registry"
    return registry
