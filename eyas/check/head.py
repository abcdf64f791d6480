"""Which wiring of a draft head works: probes a head against its target and records the result."""

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


def check_wiring(target: str, head: str, drafter: str, dtype: str, device: str, threads: int) -> WiringReport:
    """Try all plausible readings beside the target. Raises EyasError for what does not load and for methods without a head
    that could be read in several ways."""
    if threads:
        torch.set_num_threads(threads)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device, target)
    finding = validate_draft_head(drafter, load_target(target, dtype, device), head, target, dtype, device)
    if finding is None:
        raise ConfigError(f"drafter {drafter!r} has no head to check; the EAGLE methods have")
    return finding


def record(head: str, reading: HeadWiring) -> Path:
    """Write a reading into the head's config.json, where every loader of Eyas takes it from. Raises CheckpointError for a
    head that is no local folder: what a hub id fetched is shared, and would not stay."""
    if not Path(head).is_dir():
        raise CheckpointError(f"{head!r} is no local folder; copy the head into one, and write into that")
    file = Path(head, "config.json")
    file.write_text(json.dumps({**read_config(Path(head)), WIRING_KEY: asdict(reading)}, indent=1) + "\n")
    return file
