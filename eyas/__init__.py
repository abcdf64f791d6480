"""Eyas: distributed speculative decoding. Faster large language models that say exactly what they said before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.api.outputs import CompletionOutput, Logprob, RequestOutput
    from eyas.api.request import SamplingParams, StructuredOutputs
    from eyas.config import DraftingConfig, EngineConfig, TreeConfig
    from eyas.errors import EyasError
    from eyas.llm import LLM, AsyncLLM

# The log of gRPC repeats what our errors say. It reads this variable once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "DraftingConfig",
    "EngineConfig",
    "EyasError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TreeConfig",
]

_HOMES = {
    "LLM": "eyas.llm",
    "AsyncLLM": "eyas.llm",
    "CompletionOutput": "eyas.api.outputs",
    "Logprob": "eyas.api.outputs",
    "RequestOutput": "eyas.api.outputs",
    "SamplingParams": "eyas.api.request",
    "StructuredOutputs": "eyas.api.request",
    "EyasError": "eyas.errors",
    "DraftingConfig": "eyas.config",
    "EngineConfig": "eyas.config",
    "TreeConfig": "eyas.config",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the router and the command line load no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
