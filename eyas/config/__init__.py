"""Settings of every part as frozen values, and how they are read: `values` and `methods` know no files, `reading` knows no
part."""

from eyas.config.methods import EAGLE_PATHS, Eagle1Config, MethodsConfig, TreePaths
from eyas.config.reading import describe, load, masked
from eyas.config.values import (
    DraftConfig,
    DraftLinkConfig,
    Dtype,
    EagleConfig,
    EngineConfig,
    Probe,
    RegistryConfig,
    RouterConfig,
    Rule,
    ServedModel,
    ServerConfig,
    TreeConfig,
    VerifierConfig,
)

__all__ = [
    "EAGLE_PATHS",
    "DraftConfig",
    "DraftLinkConfig",
    "Dtype",
    "Eagle1Config",
    "EagleConfig",
    "EngineConfig",
    "MethodsConfig",
    "Probe",
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
