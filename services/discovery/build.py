"""Builds the discovery that the settings ask for.

Another kind of discovery is a file with an EndpointSource, two lines in `build_discovery`, and its name in DiscoveryKind.
"""

from __future__ import annotations

from eyas.config import DiscoveryConfig, RegistryConfig
from eyas.rpc.channel import Peers
from eyas.services.discovery.base import Discovery, EndpointSource
from eyas.services.discovery.probing import ProbedDiscovery, StaticEndpoints
from eyas.services.discovery.registry import Registry


def lease_registry(discovery: DiscoveryConfig, registry: RegistryConfig, peers: Peers) -> Registry | None:
    """Where a worker publishes its lease; None if it is found without one. Raises ConfigError for a bad URL."""
    return Registry(registry, peers.token) if discovery.kind == "redis" else None


def session_registry(discovery: DiscoveryConfig, registry: RegistryConfig, peers: Peers) -> Registry | None:
    """Where routers share placements; None if each keeps its own. Raises ConfigError for a bad URL."""
    return Registry(registry, peers.token) if registry.url or discovery.kind == "redis" else None


def build_discovery(config: DiscoveryConfig, registry: Registry | None, peers: Peers | None = None) -> Discovery:
    """The live workers.

    Args:
        registry: Where leases are; needed for the kind "redis".
        peers: How other kinds dial the endpoints that they probe.
    """
    if config.kind == "redis":
        assert registry is not None, "leases are kept in a registry"
        return registry
    source: EndpointSource = StaticEndpoints(config)
    if config.kind == "kubernetes":
        from eyas.services.discovery.kubernetes import KubernetesEndpoints

        source = KubernetesEndpoints(config)
    return ProbedDiscovery(source, config, peers or Peers())
