"""Digests by which services know that they hold the same checkpoint."""

from __future__ import annotations

import hashlib
import json

import torch

from eyas.models.checkpoint import WIRING_KEY, Checkpoint, CheckpointSource, open_checkpoint

# Tensors that decide the fused features of a head.
FUSER_PREFIXES = tuple(
    f"{model}{part}." for model in ("", "model.") for part in ("fc", "fusion_fc", "fc_norm", "input_norm", "hidden_norm")
)


def target_fingerprint(target: CheckpointSource) -> str:
    """Return the digest of a target's config and weights; equal on every machine that holds the same checkpoint."""
    return _digest(open_checkpoint(target), ("",))


def head_fingerprint(head: CheckpointSource) -> str:
    """Return the digest of what decides a head's fused features: its config, its fc and the norms around it."""
    return _digest(open_checkpoint(head), FUSER_PREFIXES)


def _digest(checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> str:
    """Hash config.json and, of each tensor, name, shape, dtype and about 16,000 elements spread over it."""
    config = {key: value for key, value in checkpoint.config.items() if key != WIRING_KEY}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in checkpoint.named(prefixes):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        sample = tensor.flatten()[:: max(1, tensor.numel() // 16384)].contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
