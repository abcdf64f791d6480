"""The wiring of a draft head: which one works beside a target, and a record of it in the head's config.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from eyas.drafters.registry import validate_draft_head
from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import WIRING_KEY, read_config, resolve_device, resolve_dtype
from eyas.models.heads.eagle_config import HeadWiring
from eyas.models.heads.eagle_validation import WiringReport
from eyas.models.target import load_target


def check_wiring(model: str, draft_model: str, method: str, dtype: str, device: str, threads: int) -> WiringReport:
    """Try all plausible wirings of a draft head beside the target.

    Raises EyasError for what does not load, and for a method without an EAGLE head.
    """
    if threads:
        torch.set_num_threads(threads)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device, model)
    report = validate_draft_head(method, load_target(model, dtype, device), draft_model, model, dtype, device)
    if report is None:
        raise ConfigError(f"method {method!r} has no head to check; take eagle1, eagle2 or eagle3")
    return report


def write_wiring(draft_model: str, wiring: HeadWiring) -> Path:
    """Record a wiring in the head's config.json, where every loader of Eyas reads it; the path of the file.

    Raises CheckpointError for a hub id: its files are shared and a new download would drop the record.
    """
    if not Path(draft_model).is_dir():
        raise CheckpointError(f"{draft_model!r} is not a local folder; copy the head into one, and run the check on that")
    file = Path(draft_model, "config.json")
    file.write_text(json.dumps({**read_config(Path(draft_model)), WIRING_KEY: asdict(wiring)}, indent=1) + "\n")
    return file
