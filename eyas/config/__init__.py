"""Settings of every part as frozen values, and how they are read: `values` know no files, `reading` knows no part."""

from eyas.config.fleet import DiscoveryConfig, DiscoveryKind, EjectionConfig, KubernetesConfig, PlacementConfig
from eyas.config.reading import describe, load, masked
from eyas.config.values import (
    DraftConfig,
    DraftLinkConfig,
    Dtype,
    EagleConfig,
    EngineConfig,
    RegistryConfig,
    RouterConfig,
    Rule,
    ServedModel,
    ServerConfig,
    TreeConfig,
    VerifierConfig,
)

__all__ = [
    "DiscoveryConfig",
    "DiscoveryKind",
    "DraftConfig",
    "DraftLinkConfig",
    "Dtype",
    "EagleConfig",
    "EjectionConfig",
    "EngineConfig",
    "KubernetesConfig",
    "PlacementConfig",
    "RegistryConfig",
    "RouterConfig",
    "Rule",
    "ServedModel",
    "ServerConfig",
    "TreeConfig",
    "VerifierConfig",
    "describe",
    "load",
    "masked",
]
