"""Recurrent layers over pools of states: gated delta nets, Kimi delta attention, Mamba, lightning attention, convolutions.

transformers' mixers stay as they are. Without a cache each calls a causal convolution and a scan by their names in its
module. A mixer of ours has the same code with other functions under these names: they take the states of the pass. Lightning
attention computes its recurrence in its own forward, which is replaced.

Legend: R packed rows, B segments, H heads, K and V widths of keys and values, C channels and W width of the convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.cache.state_pools import LayerStates, StatePools, StateShape
from eyas.kernels.arguments import RecurrentInputs
from eyas.kernels.by_device import recurrent_kernels
from eyas.models.recurrent_rows import RecurrentRows

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
MAMBA_1, MAMBA_2 = "mamba_selective_scan", "mamba2_chunk_scan"
SCANS = (*DELTA_RULES, MAMBA_1, MAMBA_2)
REPLACED = (CONVOLUTION, *SCANS)
# The buffer that only lightning attention has: what each head's state loses with a token.
LIGHTNING = "slope_rate"
# Arguments of a pass that a convolution gets, and after it a scan that mixers call without them.
HANDED_ON = ("packed", "kv_cache", "calls")
# What a mixer with a recurrence, not a convolution alone, calls of transformers' cache.
KEEPS_STATE = "update_recurrent_state"


@dataclass(frozen=True)
class StateCall:
    """Call of a recurrent function that a pass without weights records, with the part of a state that it shows."""

    layer: int
    shape: StateShape


class RecurrentFunctions:
    """Functions of the mixer of a layer that take the place of transformers' in a pass of Eyas.

    given: `packed` and `kv_cache` of the pass; or `calls`, to which a pass of `eyas.models.supported`, which has no weights,
    wants each call added.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def convolve(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **given: Any
    ) -> Tensor:
        """Return the causal convolution [1, C, R] of packed rows along their paths; weight [C, W]."""
        if given.get("calls") is not None:
            given["calls"].append(StateCall(self.layer, StateShape(0, 0, 0, 1, *weight.shape)))
            return hidden_states
        kernels = recurrent_kernels(given["packed"].metadata is not None, has_channel_gates=False)
        found = kernels.convolve(hidden_states[0].T, weight, bias, *self._states(given))
        return (found if activation is None else _activate(found, activation)).T[None]

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **given: Any
    ) -> tuple[Tensor, None]:
        """Return the outputs [1, R, H, V] of the gated delta rule; g holds gates of heads, or of channels of keys."""
        inputs = RecurrentInputs(query[0], key[0], value[0], g[0], beta[0], is_delta=True)
        return self._scan(inputs, given).to(query.dtype)[None], None

    def mamba_2(  # noqa: PLR0913  # the signature that transformers calls
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
        **given: Any,
    ) -> Tensor:  # fmt: skip
        """Return the outputs [1, R, H, V] of Mamba-2 (arXiv 2405.21060): keys B, queries C, updates dt x, gates dt A."""
        del chunk_size
        steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        steps = torch.clamp(F.softplus(steps) if dt_softplus else steps, *dt_limit).float()
        x, gates = hidden_states[0], steps * A.float()
        found = self._scan(RecurrentInputs(C[0], B[0], x, gates, steps, is_delta=False), given)
        return (found if D is None else found + x.float() * D[:, None])[None]

    def mamba_1(  # noqa: PLR0913  # the signature that transformers calls
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **given: Any,
    ) -> Tensor:  # fmt: skip
        """Return the outputs [1, C, R] of Mamba (arXiv 2312.00752): each channel is a head with a value of one number, whose
        keys B decay by gates dt A of their own.
        """
        x = hidden_states[0].T
        steps = dt[0].T if delta_bias is None else dt[0].T + delta_bias.to(dt.dtype)
        steps = (F.softplus(steps) if delta_softplus else steps).float()
        inputs = RecurrentInputs(C[0].T[:, None], B[0].T[:, None], x[..., None], steps[..., None] * A.float(), steps, False)
        found = self._scan(inputs, given)[..., 0]
        found = found if D is None else found + x.float() * D
        return (found if z is None else found * F.silu(z[0].T.float())).T[None]

    def lightning(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, **given: Any) -> Tensor:
        """Return the outputs [1, R, H, V] of lightning attention (arXiv 2401.04658), whose heads decay by constants."""
        gates = -slopes.float().flatten().expand(query.shape[1:3])
        inputs = RecurrentInputs(query[0], key[0], value[0], gates, torch.ones_like(gates), is_delta=False)
        return self._scan(inputs, given).to(query.dtype)[None]

    def _scan(self, inputs: RecurrentInputs, given: Mapping[str, Any]) -> Tensor:
        """Run a recurrence; float32 [R, H, V]."""
        _, keys, values, gates, betas, _ = inputs
        has_channel_gates = gates.ndim > betas.ndim
        if given.get("calls") is not None:
            gate_width = gates.shape[2] if has_channel_gates else 1
            shape = StateShape(values.shape[1], keys.shape[2], values.shape[2], gate_width, 0, 1)
            given["calls"].append(StateCall(self.layer, shape))
            return values.float()
        kernels = recurrent_kernels(given["packed"].metadata is not None, has_channel_gates)
        return kernels.scan(inputs, *self._states(given))

    def _states(self, given: Mapping[str, Any]) -> tuple[LayerStates, RecurrentRows]:
        """Return the pools of the layer, and the rows of the pass."""
        pools: StatePools | None = given["kv_cache"].recurrent
        assert pools is not None, "a recurrent layer runs without pools of states"
        return pools.layers[self.layer], given["packed"].recurrent(pools.scratch)


def use_states(model: nn.Module) -> Any:
    """Let every recurrent mixer of a model take its states from the pools of the pass. Returns the model.

    A mixer that calls another scan stays as it is: `inspect_architecture` refuses it.
    """
    for module in model.modules():
        layer: Any = getattr(module, "layer_idx", None)
        forward: Any = inspect.unwrap(type(module).forward)
        named = set(forward.__code__.co_names)
        if layer is None or "forward" in vars(module):
            continue
        if hasattr(module, LIGHTNING):
            module.forward = MethodType(partial(_lightning, int(layer)), module)
        if CONVOLUTION not in named or not (named & {*SCANS} or KEEPS_STATE not in named):
            continue
        given: dict[str, Any] | None = None
        if MAMBA_1 in named:
            given = {}
            module.dt_proj = _kept_plain(module.dt_proj)
        found = {name: _chosen(name, int(layer), forward.__globals__[name], given) for name in REPLACED if name in named}
        own = FunctionType(forward.__code__, {**forward.__globals__, **found}, forward.__name__, forward.__defaults__,
                           forward.__closure__)  # fmt: skip
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(own, module)
    return model


class ReadLinear(nn.Linear):
    """A linear layer whose weight its mixer multiplies by itself. So it is not packed."""


def _kept_plain(layer: Any) -> Any:
    """Return a linear layer with the same weights as a `ReadLinear`; another one as it is."""
    if type(layer) is not nn.Linear:
        return layer
    kept = ReadLinear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    kept.weight, kept.bias = layer.weight, layer.bias
    return kept


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a mixer that `use_states` changed."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and forward.__self__ is module and hasattr(module, "layer_idx")


def _lightning(layer: int, module: Any, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
    """Run MiniMaxLightningAttention over the states of a pass; hidden_states [1, R, C]."""
    mixed = module.act_fn(module.qkv_proj(hidden_states))
    query, key, value = mixed.view(*mixed.shape[:2], module.num_attention_heads, -1).split(module.head_dim, 3)
    attended = RecurrentFunctions(layer).lightning(query, key, value, module.slope_rate, **given)
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * module.norm(attended.flatten(2))), None


def _chosen(name: str, layer: int, own: Callable[..., Any], given: dict[str, Any] | None) -> Callable[..., Any]:
    """Return a function that calls ours in a pass of Eyas, and in others transformers' own.

    given: takes the arguments of the pass from a convolution to a scan that is called without them.
    """
    method = {CONVOLUTION: "convolve", MAMBA_1: "mamba_1", MAMBA_2: "mamba_2"}.get(name, "delta_rule")
    ours = getattr(RecurrentFunctions(layer), method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if given is not None and name == CONVOLUTION:
            given.clear()
            given.update({key: kwargs[key] for key in HANDED_ON if key in kwargs})
        elif given:
            kwargs |= given
            given.clear()  # a KV cache is not kept
        is_ours = "packed" in kwargs or kwargs.get("calls") is not None
        return (ours if is_ours else own)(*args, **kwargs)

    return call


def _activate(x: Tensor, name: str) -> Tensor:
    from transformers.activations import ACT2FN

    return ACT2FN[name](x)  # type: ignore[no-any-return]
