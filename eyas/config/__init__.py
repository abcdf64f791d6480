"""Settings of every part as frozen values, and how they are read: `values` know no files, `reading` knows no part."""

from eyas.config.methods import LookaheadConfig, MethodsConfig, PromptLookupConfig, RestConfig, UnionConfig
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
    "LookaheadConfig",
    "MethodsConfig",
    "PromptLookupConfig",
    "RegistryConfig",
    "RestConfig",
    "RouterConfig",
    "Rule",
    "ServedModel",
    "ServerConfig",
    "TreeConfig",
    "UnionConfig",
    "VerifierConfig",
    "describe",
    "load",
    "masked",
]
