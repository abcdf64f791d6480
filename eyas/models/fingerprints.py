"""Digests by which services know that they hold the same checkpoint.

Two checkpoints with equal digests have the same config and tensors of the same names, shapes and dtypes. Tensors of up to
MIN_PARTS rows are equal whole; of a larger one, as many rows as parts are compared, one at a place of its own in each. So a
change to one column, or to all rows of any two parts, is always found, in every matrix of a stack. A change to a share f of
one tensor's rows passes unseen with probability (1 - f) ** MIN_PARTS. To read everything would take as long as loading: who
edits single rows of a published checkpoint by hand should also add a key to its config.json.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

from eyas.models.checkpoint import WIRING_KEY, Checkpoint, CheckpointSource, open_checkpoint

# Parts of a large tensor, and the least bytes of a row: disks read a page at least.
MIN_PARTS = 32
MIN_ROW_BYTES = 4096
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
    """Hash config.json and, of each tensor, name, shape, dtype and a sample of its bytes."""
    config = {key: value for key, value in checkpoint.config.items() if key != WIRING_KEY}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in checkpoint.named(prefixes):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        for rows in _sample(name, tensor):
            digest.update(rows.numpy().tobytes())
    return digest.hexdigest()[:32]


def _sample(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes that stand for a tensor, uint8: a row of each part, at a place drawn from the name; all of few rows.

    Each matrix of a stack, such as those of experts, is divided into the same number of parts.
    """
    if not tensor.numel():
        return
    row_bytes = max(MIN_ROW_BYTES, tensor.shape[-1] * tensor.itemsize) if tensor.ndim > 1 else MIN_ROW_BYTES
    num_matrices = math.prod(tensor.shape[:-2])
    num_parts = -(-MIN_PARTS // num_matrices)
    draw = Random(name)  # a text seeds it alike on every machine
    for matrix in tensor.contiguous().flatten().view(torch.uint8).view(num_matrices, -1):
        num_rows = -(-len(matrix) // row_bytes)
        if num_rows <= num_parts:
            yield matrix
            continue
        for part in range(num_parts):
            start, end = part * num_rows // num_parts, (part + 1) * num_rows // num_parts
            row = start + int(draw.random() * (end - start))
            yield matrix[row * row_bytes : (row + 1) * row_bytes]
