"""What heads start from: the new features of each session in, one state of each out.

Legend: S sessions, R new features of all of them, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.cache.slots import Slots
from eyas.drafters.base import DraftContext
from eyas.drafters.slots.sessions import num_features
from eyas.models.attention import attend
from eyas.models.heads.offsets.prefix import PrefixLayer
from eyas.models.inputs import Segment, pack
from eyas.models.tensors import upload


class States(Protocol):
    """Reads features."""

    @property
    def slots_per_feature(self) -> int:
        """How many slots of a session a feature takes from then on, 1 or none."""
        ...

    def read(self, features: Tensor, contexts: Sequence[DraftContext], slots: Sequence[Slots]) -> Tensor:
        """The state [S, H] behind each session's last feature; features [R, H], session after session, each of which
        brings at least one."""
        ...


class LastFeatures:
    """The last features themselves."""

    slots_per_feature = 0

    def read(self, features: Tensor, contexts: Sequence[DraftContext], slots: Sequence[Slots]) -> Tensor:
        return features[_ends(contexts, features.device)]


class PrefixStates:
    """What the prefix layer of Hydra's prefix-mlp makes of all features of a session; keys and values stay in its slots."""

    slots_per_feature = 1

    def __init__(self, layer: PrefixLayer, num_slots: int) -> None:
        s, weight = layer.sizes, layer.out
        self._layer = layer
        self._pools = SlotPools(num_slots, [(s.num_kv_heads, s.head_dim)], 0, weight.dtype, weight.device)

    def read(self, features: Tensor, contexts: Sequence[DraftContext], slots: Sequence[Slots]) -> Tensor:
        layer, (keys,), (values,) = self._layer, self._pools.keys, self._pools.values
        counts = [num_features(context) for context in contexts]
        new = np.concatenate([own[-count:] for own, count in zip(slots, counts, strict=True)])
        places = np.concatenate([np.arange(len(own) - n, len(own)) for own, n in zip(slots, counts, strict=True)])
        rows = layer.project(features, upload(places, keys.device))
        index = upload(new, keys.device)
        keys.index_copy_(0, index, rows.key)
        values.index_copy_(0, index, rows.value)
        last = _ends(contexts, keys.device)
        packed = pack([_last_row(own) for own in slots], keys.device)
        attended = attend(rows.query[last], keys, values, packed, layer.sizes.head_dim**-0.5)
        return layer.finish(attended, rows.residual[last])


def _ends(contexts: Sequence[DraftContext], device: torch.device) -> Tensor:
    """Row of each session's last feature, [S]."""
    return upload(np.cumsum([num_features(context) for context in contexts]) - 1, device)


def _last_row(slots: Slots) -> Segment:
    last = np.array([len(slots) - 1])
    return Segment(last, last, slots[-1:], slots[:-1], None, np.zeros(1, dtype=np.int64))
