"""Settings of every part as frozen values, and how they are read: `values` know no files, `reading` knows no part."""

from eyas.config.doors import HttpConfig, KeysConfig, TlsConfig
from eyas.config.drafting import AheadConfig, EagleConfig, MethodsConfig, TreeConfig
from eyas.config.reading import describe, load, masked
from eyas.config.values import (
    BudgetPolicy,
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
    "BudgetPolicy",
    "DraftConfig",
    "DraftLinkConfig",
    "Dtype",
    "EagleConfig",
    "EngineConfig",
    "HttpConfig",
    "KeysConfig",
    "MethodsConfig",
    "RegistryConfig",
    "RouterConfig",
    "Rule",
    "ServedModel",
    "ServerConfig",
    "TlsConfig",
    "TreeConfig",
    "VerifierConfig",
    "describe",
    "load",
    "masked",
]
