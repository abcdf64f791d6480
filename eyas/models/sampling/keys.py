"""What noise keys ask of a law: keys in, filters on a device out, and which rows they concern. Knows no logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eyas.models.sampling.law import Filters
from eyas.models.tensors import upload
from eyas.request import NoiseKey


def filters_of(keys: Sequence[NoiseKey], device: torch.device) -> Filters:
    """One row for each key."""
    asked = np.array([(key.temperature, key.top_k, key.top_p, key.min_p) for key in keys], dtype=np.float64)
    temperature, top_k, top_p, min_p = upload(asked, device).unbind(1)
    return Filters(temperature.float(), top_k.long(), top_p.float(), min_p.float())


def filtering(keys: Sequence[NoiseKey]) -> list[int]:
    """The rows that top-k or top-p do something to."""
    return [row for row, key in enumerate(keys) if key.top_k > 0 or key.top_p < 1]
