"""Settings of every part as frozen values, and how they are read: `values` and `methods` know no files, `reading` knows no
part."""

from eyas.config.methods import MethodsConfig, OffsetsConfig, TreePaths
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
    "DraftConfig",
    "DraftLinkConfig",
    "Dtype",
    "EagleConfig",
    "EngineConfig",
    "MethodsConfig",
    "OffsetsConfig",
    "RegistryConfig",
    "RouterConfig",
    "Rule",
    "ServedModel",
    "ServerConfig",
    "TreeConfig",
    "TreePaths",
    "VerifierConfig",
    "describe",
    "load",
    "masked",
]
