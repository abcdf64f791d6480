"""Draft heads that run by compiled kernels of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.arrays import Floats, Ints
from eyas.cache.kv_cache import KVCache
from eyas.kernels.arguments import AttentionRule, RowKeys
from eyas.models.backends.cpu import CpuLayer, CpuProduct, CpuProducts, CpuRows, CpuStack
from eyas.models.backends.packed_weights import NO_WEIGHT, PackedLinear, PackedProduct
from eyas.models.heads.block_config import BlockHeadConfig
from eyas.models.heads.layers import DraftLayer
from eyas.models.inputs import Segment, Segments
from eyas.models.layers.fused import merged_product
from eyas.models.layers.norms import HeadLayout, RMSNorm

if TYPE_CHECKING:
    from eyas.kernels.cpu.eagle_trees import EagleWeights
    from eyas.models.heads.eagle import EagleHead

# Of a level's rows: embeddings and features side by side [R, 2 H], residual [R, H], cos and sin [R, d], slots, RowKeys.
LevelRows = tuple[Floats, Floats, Floats, Floats, Ints, RowKeys]


class CompiledEagle:
    """The layers of an EAGLE head by the kernels of the CPU; the order is that of `EagleHead.run`.

    Args:
        head: packed, in float32.
    """

    def __init__(self, head: EagleHead) -> None:
        from eyas.kernels.cpu import layers

        layers.compile_kernels()
        self._kernels = layers
        self._head, self._embedding = head, head.embedding.detach().numpy()
        self._cos, self._sin = (head.rotary[:, i].contiguous().numpy() for i in range(2))
        parts, eps = [head.layer(number) for number in range(len(head.layers))], head.config.rms_norm_eps
        final = torch.ones(head.config.hidden) if head.norm is None else head.norm
        weights = [*(layer.input_norm for layer in parts[1:]), final]
        norms = [RMSNorm(weight, eps, adds_one=False) for weight in weights if weight is not None]
        self._layers = [_compiled_layer(layer, norm) for layer, norm in zip(parts, norms, strict=True)]
        self._stack = CpuStack.of(self._layers)
        self._final_norm = norms[-1]
        pair_norms = parts[0].hidden_norm, parts[0].input_norm  # none in an EAGLE-1 head, which has fc instead
        self._pair_norms = [norm.detach().numpy() for norm in pair_norms if norm is not None]

    @property
    def has_stack(self) -> bool:
        """Return whether one kernel runs all layers."""
        return self._stack is not None

    @property
    def weights(self) -> EagleWeights:
        """What the inputs of the layers are made from, as a kernel takes it."""
        from eyas.kernels.cpu.eagle_trees import EagleWeights

        state_norm, token_norm = self._pair_norms or [NO_WEIGHT, NO_WEIGHT]
        config, ids = self._head.config, self._head.draft_ids.numpy()
        norms = state_norm, token_norm, config.rms_norm_eps, config.wiring.norm_before_residual
        return EagleWeights(self._embedding, ids, self._cos, self._sin, *norms)

    def logits(self, states: Tensor) -> Tensor:
        """Return draft logits [R, D] of states [R, H]."""
        if self._head.config.wiring.output == "state":
            norm, normed = self._final_norm, torch.empty_like(states)
            self._kernels.norm(states.numpy(), norm.factors, norm.eps, normed.numpy())
            states = normed
        return self._head.lm_head(states)  # type: ignore[no-any-return]

    def run_level(self, level: LevelRows, kv: KVCache) -> tuple[Tensor, Tensor]:
        """Return the states [R, H] of a level's rows behind all layers, and their draft logits [R, D].

        level: see `grow_eagle_level`.
        """
        pairs, residual, cos, sin, slots, keys = level
        inputs, state = torch.from_numpy(pairs), torch.from_numpy(residual)
        if self._head.fc is not None:
            inputs = state = self._head.fc(inputs)
        rows, output = CpuRows(state, slots, keys, inputs=inputs), self._head.config.wiring.output
        assert self._stack is not None
        self._stack.run(rows, [(cos, sin)], kv)
        states = rows.normed if output == "normed" else rows.state
        return states, self._head.lm_head(rows.state if output == "bare" else rows.normed)

    def run(self, features: Tensor, segments: Sequence[Segment], kv: KVCache, last: Sequence[Segment] = ()) -> Tensor:
        """Return the states [R, H] of rows, features [R, H], behind all layers.

        Args:
            last: the last row of each segment, again. The last layer finishes these rows alone, and only their states are
                returned [S, H]; without them all.
        """
        head, width, packed = self._head, features.shape[1], Segments.of(segments)
        tokens, _, slots, *_ = packed.rows
        keys = packed.row_keys()
        if head.fc is not None:
            inputs, residual = head.first_inputs(F.embedding(torch.from_numpy(tokens), head.embedding), features)
        else:
            inputs, residual = torch.empty(len(tokens), 2 * width), torch.empty(len(tokens), width)
            self._kernels.pair_inputs(
                features.numpy(), np.arange(len(tokens)), self._embedding, tokens, *self._pair_norms,
                head.config.rms_norm_eps, inputs.numpy(), residual.numpy(),
            )  # fmt: skip
            if head.config.wiring.norm_before_residual:
                residual.copy_(inputs[:, width:])
        rows = CpuRows(residual, slots, keys, inputs=inputs)
        rotary = self._cos[keys.positions], self._sin[keys.positions]
        if self._stack and not last:
            self._stack.run(rows, [rotary], kv)
        else:
            for number, layer in enumerate(self._layers):
                qkv = layer.project(self._kernels, rows, rotary, kv, number)
                if last and number == len(self._layers) - 1:
                    ends = keys.ends - 1
                    own = rows.state[torch.from_numpy(ends)]
                    rows, qkv = CpuRows(own, slots[:0], Segments.of(last).row_keys()), qkv[ends]
                layer.finish(self._kernels, rows, qkv, kv, number)
        return rows.normed if head.config.wiring.output == "normed" else rows.state


def _compiled_layer(layer: DraftLayer, behind: RMSNorm) -> CpuLayer:
    """Return a layer for the kernels of the CPU. behind: the norm of what it returns."""
    sizes, parts = layer.sizes, (layer.qkv, layer.out, layer.gate_up, layer.down)
    products = CpuProducts.of(*(part.product if isinstance(part, PackedLinear) else part for part in parts))
    norm = RMSNorm(layer.post_norm, sizes.rms_norm_eps, adds_one=False)
    return CpuLayer(products, layer.heads, AttentionRule(sizes.head_dim**-0.5), "silu", norm, behind)


class CompiledBackbone:
    """A head's layers by the kernels of the CPU. One product makes keys and values of context for all layers.

    Args:
        layers: packed, in float32, without convolutions and biases.
        norm: behind them.
        rotary: [length, 2, d].
        to_bytes: whether their weights are rounded to 8 bits.
    """

    def __init__(
        self, c: BlockHeadConfig, layers: Sequence[Any], norm: nn.RMSNorm, rotary: Tensor, to_bytes: bool = False
    ) -> None:
        from eyas.kernels.cpu import layers as kernels

        kernels.compile_kernels()
        self._kernels, self._config, self._num_kv = kernels, c, c.num_kv_heads
        self._cos, self._sin = (rotary[:, i].contiguous().numpy() for i in range(2))
        firsts = [self._norm(layer.input_layernorm.weight) for layer in layers]
        self._first, nexts = firsts[0], [*firsts[1:], self._norm(norm.weight)]
        self._layers = [
            self._compiled(layer, window, behind) for layer, window, behind in zip(layers, c.windows, nexts, strict=True)
        ]
        self._stack = CpuStack.of(self._layers)
        parts = [[getattr(layer.self_attn, name) for layer in layers] for name in ("k_proj", "v_proj")]
        context = PackedProduct(torch.cat([part.weight for each in parts for part in each]), to_bytes=to_bytes)
        self._context = CpuProduct.of(context)
        norms = [layer.self_attn.k_norm.weight.expand(self._num_kv, -1) for layer in layers]
        self._context_norm = self._norm(torch.cat(norms))

    def cache_context(self, features: Tensor, positions: Ints, slots: Ints, kv: KVCache) -> None:
        """Write keys and values of context features [R, H], at positions [R], to slots [R] of every layer."""
        rows = self._context.multiply(features).view(len(features), -1, self._config.head_dim).numpy()
        num_keys, norm, rotary = rows.shape[1] // 2, self._context_norm, self._rotary(positions)
        self._kernels.rotate(rows, self._context.by, num_keys, *rotary, norm.factors, norm.eps)
        for layer, pools in enumerate(kv.arrays):
            self._kernels.store(rows, layer * self._num_kv, num_keys, *pools, slots)

    def run(self, embedded: Tensor, blocks: Sequence[Segment], kv: KVCache) -> Tensor:
        """Return the rows of blocks, embeddings [R, H], to normed states [R, H]. blocks: one after the other; their rows see
        each other and their prefixes.
        """
        whole = Segments.of(blocks).row_keys()
        rows, rotary = CpuRows(embedded, whole.positions[:0], whole), self._rotary(whole.positions)
        causal = whole
        if self._config.causal_windows:
            causal = Segments.of([block._replace(visible=None) for block in blocks]).row_keys()
        rows.start(self._kernels, self._first)
        if self._stack and causal is whole:
            self._stack.run(rows, [rotary], kv)
            return rows.normed
        for number, layer in enumerate(self._layers):
            rows.keys = whole if layer.attention.window is None else causal
            layer.run(self._kernels, rows, rotary, kv, number)
        return rows.normed

    def _compiled(self, layer: Any, window: int | None, behind: RMSNorm) -> CpuLayer:
        c, attention, mlp = self._config, layer.self_attn, layer.mlp
        weights = [attention.q_norm.weight.expand(c.num_heads, -1), attention.k_norm.weight.expand(c.num_kv_heads, -1)]
        heads = HeadLayout(c.num_heads, c.num_kv_heads, c.head_dim, self._norm(torch.cat(weights)))
        qkv = merged_product([attention.q_proj, attention.k_proj, attention.v_proj])
        out, down = (x.product if isinstance(x, PackedLinear) else x for x in (attention.o_proj, mlp.down_proj))
        products = CpuProducts.of(qkv, out, merged_product([mlp.gate_proj, mlp.up_proj]), down)
        mlp_norm = self._norm(layer.post_attention_layernorm.weight)
        return CpuLayer(products, heads, AttentionRule(c.head_dim**-0.5, window), "silu", mlp_norm, behind)

    def _norm(self, weight: Tensor) -> RMSNorm:
        return RMSNorm(weight, self._config.rms_norm_eps, adds_one=False)

    def _rotary(self, positions: Ints) -> tuple[Floats, Floats]:
        return self._cos[positions], self._sin[positions]
