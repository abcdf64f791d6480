"""Settings of every part as frozen values, and how they are read: `values` know no files, `reading` knows no part."""

from eyas.config.drafting import AheadConfig, EagleConfig, MethodsConfig, TreeConfig
from eyas.config.reading import describe, load, masked
from eyas.config.values import (
    DraftConfig,
    DraftLinkConfig,
    Dtype,
    EngineConfig,
    RegistryConfig,
    RouterConfig,
    Rule,
    ServedModel,
    ServerConfig,
    VerifierConfig,
)

__all__ = [
    "AheadConfig",
    "DraftConfig",
    "DraftLinkConfig",
    "Dtype",
    "EagleConfig",
    "EngineConfig",
    "MethodsConfig",
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
