"""Settings of every part as frozen values, and how they are read: `values` and `methods` know no files, `reading` knows no
part."""

from eyas.config.doors import HttpConfig, KeysConfig, TlsConfig
from eyas.config.drafting import AheadConfig, EagleConfig, TreeConfig
from eyas.config.fleet import DiscoveryConfig, DiscoveryKind, EjectionConfig, KubernetesConfig, PlacementConfig
from eyas.config.methods import (
    EAGLE_PATHS,
    Eagle1Config,
    LookaheadConfig,
    MethodsConfig,
    OffsetsConfig,
    PromptLookupConfig,
    RestConfig,
    SmallConfig,
    TreePaths,
    UnionConfig,
)
from eyas.config.peers import Clients, DraftLinkConfig, PeersConfig
from eyas.config.reading import describe, load, masked, validated
from eyas.config.telemetry import LogFormat, TelemetryConfig
from eyas.config.values import (
    BudgetPolicy,
    DraftConfig,
    DraftedModel,
    Dtype,
    EngineConfig,
    Probe,
    RegistryConfig,
    RouterConfig,
    Rule,
    ServedModel,
    ServerConfig,
    VerifierConfig,
)

__all__ = [
    "EAGLE_PATHS",
    "AheadConfig",
    "BudgetPolicy",
    "Clients",
    "DiscoveryConfig",
    "DiscoveryKind",
    "DraftConfig",
    "DraftLinkConfig",
    "DraftedModel",
    "Dtype",
    "Eagle1Config",
    "EagleConfig",
    "EjectionConfig",
    "EngineConfig",
    "HttpConfig",
    "KeysConfig",
    "KubernetesConfig",
    "LogFormat",
    "LookaheadConfig",
    "MethodsConfig",
    "OffsetsConfig",
    "PeersConfig",
    "PlacementConfig",
    "Probe",
    "PromptLookupConfig",
    "RegistryConfig",
    "RestConfig",
    "RouterConfig",
    "Rule",
    "ServedModel",
    "ServerConfig",
    "SmallConfig",
    "TelemetryConfig",
    "TlsConfig",
    "TreeConfig",
    "TreePaths",
    "UnionConfig",
    "VerifierConfig",
    "describe",
    "load",
    "masked",
    "validated",
]
