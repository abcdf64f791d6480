"""Experts of a fused layer: what routes rows to them and their weights, as the kernels of CUDA take them.

transformers' modules stay the definition, and compute wherever kernels cannot: on the CPU, and with quantised weights that
are not blocks of 8 bits. Over ranks each expert is split, and outputs are summed by what `parallel.shards` has added to the
module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.parallel.shards import SumOverRanks

if TYPE_CHECKING:
    from eyas.models.layers.norms import RMSNorm
from eyas.kernels.arguments import SCALED_TILE

# Modules in the place of an MLP, with a router named `gate`.
EXPERT_BLOCKS = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
SCALES = (torch.float32, torch.bfloat16)  # types of scales; checkpoints have both


@dataclass(frozen=True)
class ExpertNorms:
    """Norms of a layer of Gemma 4 with experts beside its MLP.

    Attributes:
        router_scale, router_factor: of the router's own input, whose norm has the epsilon of the others.
        outputs: of the experts and of the MLP.
    """

    router_scale: Tensor
    router_factor: float
    inputs: RMSNorm
    outputs: tuple[RMSNorm, RMSNorm]


class WeightScales(NamedTuple):
    """Scales of experts' weights of 8 bits: of gate_up [E, 2 I / block[0], C / block[1]], and of down alike."""

    gate_up: Tensor
    down: Tensor
    block: tuple[int, int]


class ExpertOutputs(NamedTuple):
    """Outputs of experts for rows [..., C]: outputs [R, K, C] and their shares [R, K], or their sum without shares.

    Attributes:
        dense: the output of an MLP beside them, like rows.
        norms: of the experts' sum and of dense, before these are added.
    """

    outputs: Tensor
    shares: Tensor | None
    dense: Tensor | None
    norms: tuple[RMSNorm, RMSNorm] | None


@dataclass(frozen=True)
class RoutedExperts:
    """Weights of a layer's router [E, C] and experts: gate_up [E, 2 I, C], down [E, C, I], with this rank's part of I.

    Attributes:
        weight_scales: of weights of 8 bits.
        scales: of each expert's share, [E].
        normalises: whether the shares of the chosen experts add up to 1.
        rounds_weights: whether they are rounded to the type of rows.
        sum_ranks: the sum over ranks of what experts give; None for whole experts.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int
    activation: str
    normalises: bool = True
    rounds_weights: bool = False
    scales: Tensor | None = None
    weight_scales: WeightScales | None = None
    norms: ExpertNorms | None = None
    sum_ranks: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of_block(cls, block: Any, activation: str | None) -> RoutedExperts | None:
        """Return the experts of Mixtral or Qwen3-MoE; None if kernels cannot run them."""
        router, experts = block.gate, block.experts
        if activation is None or not _can_run(experts, router.weight, block, router):
            return None
        is_qwen = type(block).__name__ == EXPERT_BLOCKS[1]
        return cls(
            router.weight.detach(), experts.gate_up_proj.detach(), experts.down_proj.detach(), int(router.top_k), activation,
            bool(router.norm_topk_prob) if is_qwen else True, is_qwen,
            weight_scales=_scales_of(experts), sum_ranks=_sum_of(experts),
        )  # fmt: skip

    @classmethod
    def of_layer(cls, layer: Any, activation: str, norm_of: Callable[[Any], RMSNorm]) -> RoutedExperts | None:
        """Return the experts of a layer of Gemma 4; None if kernels cannot run them."""
        router, experts = layer.router, layer.experts
        if not _can_run(experts, getattr(router.proj, "weight", None), router, router.proj):
            return None
        outputs = norm_of(layer.post_feedforward_layernorm_2), norm_of(layer.post_feedforward_layernorm_1)
        norms = ExpertNorms(
            router.scale.detach(), float(router.scalar_root_size), norm_of(layer.pre_feedforward_layernorm_2), outputs
        )
        return cls(
            router.proj.weight.detach(), experts.gate_up_proj.detach(), experts.down_proj.detach(),
            int(router.config.top_k_experts), activation, scales=router.per_expert_scale.detach(),
            weight_scales=_scales_of(experts), norms=norms, sum_ranks=_sum_of(experts),
        )  # fmt: skip

    def add_norms(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run `add_norm` of layers, and return what router and experts beside an MLP see of the sum."""
        found: tuple[Tensor, ...] = _kernels().add_norms(self.norms, *arguments)
        return found

    def run(self, to_router: Tensor, to_experts: Tensor, dense: Tensor | None = None) -> ExpertOutputs:
        """Return what the experts give for rows [..., C], by kernels of CUDA. dense: the output of an MLP beside them."""
        to_router, to_experts = (rows.reshape(-1, rows.shape[-1]) for rows in (to_router, to_experts))
        kernels, norms = _kernels(), self.norms.outputs if self.norms else None
        routing = kernels.route(F.linear(to_router, self.router), self)
        outputs = kernels.expert_outputs(to_experts, routing, self)
        if self.sum_ranks is None:
            return ExpertOutputs(outputs, routing.shares, dense, norms)
        # Each rank has a part of every expert, so outputs are sums over ranks; shares are applied before the sum.
        return ExpertOutputs(self.sum_ranks(kernels.combine(outputs, routing.shares)), None, dense, norms)


def _kernels() -> Any:
    from eyas.kernels.cuda import experts as expert_kernels

    return expert_kernels


def with_experts(layer: Any, state: Tensor, dense: Tensor) -> Tensor:
    """Return what MLP and experts of a layer of Gemma 4 give together, by transformers' modules. dense: the output of its
    MLP.
    """
    rows = state.reshape(-1, state.shape[-1])
    _, weights, chosen = layer.router(rows)
    routed = layer.experts(layer.pre_feedforward_layernorm_2(rows), chosen, weights).view_as(state)
    sparse: Tensor = layer.post_feedforward_layernorm_2(routed)
    return sparse.add_(layer.post_feedforward_layernorm_1(dense))


def _can_run(experts: Any, router_weight: Any, *modules: Any) -> bool:
    """Return whether kernels can read all weights, and calling the modules does nothing more, but for a sum of the experts
    over ranks.
    """
    held: list[Any] = [router_weight, getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)]
    if any(type(weight) is not nn.Parameter for weight in held):
        return False
    sums = list(experts._forward_hooks.values())
    if len(sums) > 1 or not all(isinstance(hook, SumOverRanks) for hook in sums):
        return False
    hooks = experts._forward_pre_hooks, *(each for one in modules for each in (one._forward_hooks, one._forward_pre_hooks))
    router, *weights = held
    has_types = all(weight.dtype == router.dtype for weight in weights) or _scales_of(experts) is not None
    return has_types and not any(hooks)


def _scales_of(experts: Any) -> WeightScales | None:
    """Return scales of transformers' FP8Experts; None for plain weights, and for scales that do not cover whole tiles."""
    block = getattr(experts, "block_size", None)
    if not block or any(size % SCALED_TILE for size in block) or experts.down_proj.shape[2] % block[0]:
        return None
    weights = experts.gate_up_proj, experts.down_proj
    scales = experts.gate_up_proj_scale_inv.detach(), experts.down_proj_scale_inv.detach()
    has_types = all(each.dtype == torch.float8_e4m3fn for each in weights) and all(each.dtype in SCALES for each in scales)
    if not has_types:
        return None
    return WeightScales(*scales, (int(block[0]), int(block[1])))


def _sum_of(experts: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the sum over ranks that `shard_model` has added behind the module; None without ranks."""
    return next((hook.exchanges.sum for hook in experts._forward_hooks.values()), None)
