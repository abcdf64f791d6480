"""Cuts a loaded model to one rank's share, as the tensor-parallel plan of transformers says. Knows no sequences.

Ranks exchange values in two places: the sum behind a layer split by rows, and the gathering of an output split by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyas.errors import CheckpointError

# How the plan's styles split a layer. Styles that only matter to gradients split nothing; embeddings stay whole, for a
# lookup in one's own memory is cheaper than a sum over ranks.
COLUMNS = frozenset({"colwise", "colwise_rep", "colwise_gather_output"})
GATHERED = frozenset({"colwise_rep", "colwise_gather_output"})
ROWS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})
PACKED = frozenset({"packed_colwise"})
SUMMED = frozenset({"moe_tp_experts", "all_reduce"})
WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"})

_KEYS_AND_VALUES = ("k_proj", "v_proj")
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True)
class Shard:
    """Which part of every split layer is ours."""

    rank: int
    size: int

    def cut(self, tensor: Tensor, dim: int, parts: int = 1) -> Tensor:
        """Our slice of each of the `parts` equal parts of a dimension, as a copy: weights of a file that is mapped into
        memory are read only where they are ours. Raises CheckpointError when the ranks do not divide it."""
        if tensor.shape[dim] % (parts * self.size):
            raise CheckpointError(f"a width of {tensor.shape[dim]} cannot be split over {self.size} ranks")
        return torch.cat([part.chunk(self.size, dim)[self.rank] for part in tensor.chunk(parts, dim)], dim)

    def of_heads(self, num_heads: int) -> Shard:
        """Our part of so many key-value heads. Of fewer heads than ranks each has one, as have those beside it: the one that
        its query heads read. Raises CheckpointError when they come out uneven."""
        if not evenly(num_heads, self.size):
            raise CheckpointError(
                f"{self.size} ranks cannot share {num_heads} key-value heads evenly; "
                "engine.tensor_parallel_size must divide them or be a multiple of them"
            )
        parts = min(num_heads, self.size)
        return Shard(self.rank * parts // self.size, parts)


def evenly(num_kv_heads: int, num_ranks: int) -> bool:
    """Whether ranks can have equally many key-value heads each, alone or as copies."""
    return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0


def shard(model: Any, share: Shard, kv_heads: Sequence[int]) -> None:
    """Cut the weights of a causal LM in place and add what the ranks exchange. Every rank must do the same.

    kv_heads: of every layer. Raises CheckpointError for a model without a plan, with quantised weights, with a style that is
    not known here, or with a width or heads that the ranks cannot share.
    """
    plan, name = dict(getattr(model, "tp_plan", None) or {}), type(model).__name__
    if not plan:
        raise CheckpointError(f"{name} has no tensor-parallel plan in transformers; set engine.tensor_parallel_size to 1")
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError(f"ranks cannot share the quantised weights of {name}; set engine.tensor_parallel_size to 1")
    if unknown := set(plan.values()) - COLUMNS - ROWS - PACKED - SUMMED - WHOLE:
        raise CheckpointError(f"the plan of {name} asks for {', '.join(sorted(unknown))}, which Eyas cannot do over ranks")
    for path, module in list(model.named_modules()):
        style = _style(plan, path)
        if style in GATHERED and int(cast(Any, module).out_features) % share.size:
            continue  # everybody gets its whole output anyway
        for key, _ in list(module.named_parameters(recurse=False)):
            _cut_parameter(module, key, _style(plan, f"{path}.{key}") or style, _share_of(path, style, share, kv_heads))
        _exchange(module, style, share)


def splits_heads(model: Any) -> bool:
    """Whether each rank holds keys and values of its own heads only, rather than of all heads."""
    plan = getattr(model, "tp_plan", None) or {}
    return any(path.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise" for path, style in plan.items())


def _share_of(path: str, style: str | None, share: Shard, kv_heads: Sequence[int]) -> Shard:
    """What we have of a layer split by columns: of keys and values whole heads."""
    *above, name = path.split(".")
    if style != "colwise" or name not in _KEYS_AND_VALUES:
        return share
    return share.of_heads(kv_heads[int(next(part for part in reversed(above) if part.isdigit()))])


def _style(plan: dict[str, str], path: str) -> str | None:
    """The plan writes `*` for the number of a layer."""
    return plan.get(".".join("*" if part.isdigit() else part for part in path.split(".")))


def _cut_parameter(module: nn.Module, key: str, style: str | None, share: Shard) -> None:
    whole: Tensor = getattr(module, key)
    if style in COLUMNS:
        mine = share.cut(whole, max(whole.ndim - 2, 0))
    elif style in PACKED:
        mine = share.cut(whole, max(whole.ndim - 2, 0), parts=2)
    elif style in ROWS and whole.ndim > 1:
        mine = share.cut(whole, -1)
    elif style in ROWS and share.rank > 0:  # a bias is added once
        mine = torch.zeros_like(whole)
    else:
        return
    setattr(module, key, nn.Parameter(mine, requires_grad=False))


def _exchange(module: nn.Module, style: str | None, share: Shard) -> None:
    if style == "rowwise_split_input":
        module.register_forward_pre_hook(_split_input(share))
    if style in ROWS | SUMMED:
        module.register_forward_hook(_sum)
    elif style in GATHERED:
        module.register_forward_hook(_gather(share))


def _split_input(share: Shard) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def split(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].chunk(share.size, -1)[share.rank], *args[1:])

    return split


def _sum(module: nn.Module, args: object, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _gather(share: Shard) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def gather(module: nn.Module, args: object, output: Tensor) -> Tensor:
        parts = [torch.empty_like(output) for _ in range(share.size)]
        dist.all_gather(parts, output.contiguous())
        return torch.cat(parts, -1)

    return gather
