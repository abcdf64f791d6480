"""The tensors of recurrent states: pools with one row for each state, and the stash of a pass's tree nodes.

A state takes as much memory as a thousand tokens of KV, so the nodes of a tree get none: a layer stashes what each node
would add, and the next pass adds what was accepted. Legend: P rows of a pool, T rows of the stash, H heads, K and V widths
of keys and values, C channels of the convolution, W its width in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.cache.kv_cache import new_pool
from eyas.cache.states import StateSizes


class StateShape(NamedTuple):
    """State of a sequence in a layer.

    Attributes:
        num_heads: of a recurrence; 0 for a layer with a convolution alone.
        gate_width: K if each channel of keys has a gate, else 1.
        channels, width: of the convolution; it keeps its last `width` - 1 inputs.
    """

    num_heads: int
    key_width: int
    value_width: int
    gate_width: int
    channels: int
    width: int

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a row of the pools. dtype: of the convolution's inputs; the recurrence has float32."""
        columns = self.channels * (self.width - 1) * dtype.itemsize
        return self.num_heads * self.key_width * self.value_width * torch.float32.itemsize + columns

    def stash_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a node in the stash."""
        numbers = self.num_heads * (self.key_width + self.value_width + self.gate_width)
        return numbers * torch.float32.itemsize + self.channels * dtype.itemsize


@dataclass(frozen=True)
class LayerStates:
    """Pools and stash of a layer.

    Attributes:
        states: float32 [P, H, K, V].
        columns: the convolution's last inputs [P, W - 1, C].
        keys, updates, sums: what nodes would add, see `eyas.kernels.plain.recurrent`: [T, H, K], [T, H, V], and [T, H] or
            [T, H, K].
        inputs: of the convolution at nodes [T, C].
    """

    states: Tensor
    columns: Tensor
    keys: Tensor
    updates: Tensor
    sums: Tensor
    inputs: Tensor


class StatePools:
    """The states of all recurrent layers. The last row of the pools is scratch: passes without a sequence write to it.

    Args:
        shapes: by layer.
    """

    def __init__(
        self, shapes: Mapping[int, StateShape], sizes: StateSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_rows, num_stashed = sizes
        self.scratch = num_rows
        self.layers: dict[int, LayerStates] = {}
        for layer, shape in shapes.items():
            heads, key, value, gate, channels, width = shape
            sums = (num_stashed, heads, gate) if gate > 1 else (num_stashed, heads)
            shapes_of = ((num_rows + 1, heads, key, value), (num_stashed, heads, key), (num_stashed, heads, value), sums)
            states, keys, updates, gates = (new_pool(shape, torch.float32, device) for shape in shapes_of)
            columns = new_pool((num_rows + 1, width - 1, channels), dtype, device)
            inputs = new_pool((num_stashed, channels), dtype, device)
            self.layers[layer] = LayerStates(states, columns, keys, updates, gates, inputs)


class StatePlan(NamedTuple):
    """Sizes of the pools of recurrent states, their bytes, and the sequences that may run with them."""

    sizes: StateSizes
    num_bytes: int
    num_running: int


def states_that_fit(
    shapes: Mapping[int, StateShape], num_running: int, num_kept: int, num_nodes: int, most_nodes: int, dtype: torch.dtype,
    most: int,
) -> StatePlan:  # fmt: skip
    """Return the pools for as many sequences as fit into `most` bytes, for one at least.

    Args:
        num_running: sequences at most, each with two rows.
        num_kept: rows for each of them that keep a state for later.
        num_nodes: of a sequence's tree; a step has `most_nodes` at most, and the stash holds two steps' nodes.
    """
    state, node = (sum(size(shape, dtype) for shape in shapes.values())
                   for size in (StateShape.state_bytes, StateShape.stash_bytes))  # fmt: skip
    plans = list[StatePlan]()
    for running in range(1, num_running + 1):
        sizes = StateSizes(1 + running * (2 + num_kept), 2 * min(running * num_nodes, most_nodes))
        plan = StatePlan(sizes, state * (sizes.rows + 1) + node * sizes.stashed, running)  # with the scratch
        if plans and plan.num_bytes > most:
            break
        plans.append(plan)
    return plans[-1]
