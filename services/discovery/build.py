"""Builds the discovery that the settings ask for.

Another kind of discovery is a file with an EndpointSource, a line in ENDPOINT_SOURCES, and its name in DiscoveryKind.
"""

from __future__ import annotations

from importlib import import_module

from eyas.config import DiscoveryConfig, RegistryConfig
from eyas.rpc.channel import Peers
from eyas.services.discovery.base import Discovery
from eyas.services.discovery.probing import ProbedDiscovery
from eyas.services.discovery.registry import Registry

# discovery.kind -> module:class of its EndpointSource, imported when it is used. "redis" finds workers by their leases.
ENDPOINT_SOURCES = {
    "static": "eyas.services.discovery.probing:StaticEndpoints",
    "kubernetes": "eyas.services.discovery.kubernetes:KubernetesEndpoints",
}


def lease_registry(discovery: DiscoveryConfig, registry: RegistryConfig) -> Registry | None:
    """Where a worker publishes its lease; None if it is found without one. Raises ConfigError for a bad URL."""
    return Registry(registry) if discovery.kind == "redis" else None


def session_registry(discovery: DiscoveryConfig, registry: RegistryConfig) -> Registry | None:
    """Where routers share placements; None if each keeps its own. Raises ConfigError for a bad URL."""
    return Registry(registry) if registry.url or discovery.kind == "redis" else None


def build_discovery(config: DiscoveryConfig, registry: Registry | None, peers: Peers | None = None) -> Discovery:
    """The live workers.

    Args:
        registry: Where leases are; needed for the kind "redis".
        peers: How other kinds dial the endpoints that they probe.
    """
    if config.kind == "redis":
        assert registry is not None, "leases are kept in a registry"
        return registry
    module, _, name = ENDPOINT_SOURCES[config.kind].partition(":")
    return ProbedDiscovery(getattr(import_module(module), name)(config), config, peers or Peers())
