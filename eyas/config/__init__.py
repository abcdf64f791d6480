"""Settings of every part as frozen values, and how they are read: `values` know no files, `reading` knows no part."""

from eyas.config.doors import HttpConfig, KeysConfig, TlsConfig
from eyas.config.reading import describe, load, masked
from eyas.config.telemetry import LogFormat, TelemetryConfig
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
    "HttpConfig",
    "KeysConfig",
    "LogFormat",
    "RegistryConfig",
    "RouterConfig",
    "Rule",
    "ServedModel",
    "ServerConfig",
    "TelemetryConfig",
    "TlsConfig",
    "TreeConfig",
    "VerifierConfig",
    "describe",
    "load",
    "masked",
]
