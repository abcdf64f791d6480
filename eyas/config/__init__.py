"""Settings of every part as frozen values, and how they are read: `values` know no files, `reading` knows no part."""

from eyas.config.doors import HttpConfig, KeysConfig, TlsConfig
from eyas.config.drafting import AheadConfig, EagleConfig, TreeConfig
from eyas.config.methods import MethodsConfig, SmallConfig
from eyas.config.reading import describe, load, masked
from eyas.config.telemetry import LogFormat, TelemetryConfig
from eyas.config.values import (
    DraftConfig,
    DraftedModel,
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
    "DraftedModel",
    "Dtype",
    "EagleConfig",
    "EngineConfig",
    "HttpConfig",
    "KeysConfig",
    "LogFormat",
    "MethodsConfig",
    "RegistryConfig",
    "RouterConfig",
    "Rule",
    "ServedModel",
    "ServerConfig",
    "SmallConfig",
    "TelemetryConfig",
    "TlsConfig",
    "TreeConfig",
    "VerifierConfig",
    "describe",
    "load",
    "masked",
]
