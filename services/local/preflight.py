"""Checks of a service's settings for `eyas serve`: mistakes show before processes start.

They load no weights; a GGUF file is unpacked here, so that no process waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from eyas.config import DraftConfig, RouterConfig, VerifierConfig
from eyas.config.file_values import check_source
from eyas.config.target_limits import check_target
from eyas.emulation.costs import DeviceCosts
from eyas.errors import CheckpointError, ConfigError
from eyas.rpc.channel import Peers
from eyas.text.chat_template import load_template
from eyas.text.tokenizer import fetch_file


def check_settings(config: RouterConfig | VerifierConfig | DraftConfig, environment: Mapping[str, str]) -> None:
    """Check what the service would refuse once it runs: files, keys, the model's limits, devices.

    environment: variables of the service. Raises ConfigError and CheckpointError, as the service would.
    """
    if not config.peers.token_env or config.peers.token_env in environment:
        Peers(config.peers)
    match config:
        case RouterConfig():
            _check_router(config, environment)
        case VerifierConfig():
            check_target(config.model, config.engine)
            _check_draft_model(config.draft_model)
            _check_device(config.device, config.dtype, config.engine.emulated_device)
        case DraftConfig():
            for model in config.models:
                check_source(model.model)
                _check_draft_model(model.draft_model)
                _check_device(model.device, model.dtype, model.drafting.emulated_device)


def _check_router(config: RouterConfig, environment: Mapping[str, str]) -> None:
    if not config.models:
        raise ConfigError("models is empty; name at least one model and its tokenizer")
    for model in config.models:
        if fetch_file(model.tokenizer, "tokenizer.json") is None:
            raise CheckpointError(f"no tokenizer.json in {model.tokenizer!r}; give a folder or a hub id that holds one")
        load_template(model)
    if config.api_keys.env or config.api_keys.file:
        from eyas.services.router.auth.keys import load_api_keys

        load_api_keys(config.api_keys, environment)


def _check_draft_model(source: str) -> None:
    if source:
        check_source(source)


def _check_device(device: str, dtype: str, emulated: str) -> None:
    """Check the device. Torch, which takes seconds to import, is asked only about one that is named and not the CPU."""
    if emulated:
        DeviceCosts.read(emulated)
    if device not in ("auto", "cpu"):
        from eyas.device.placement import check_device

        check_device("float32" if dtype == "auto" else dtype, device)
