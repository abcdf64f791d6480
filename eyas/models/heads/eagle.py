"""EAGLE heads of all generations: loaded strictly, and written in the layout of their first publication.

Li et al. 2024 (EAGLE, EAGLE-2) and 2025 (EAGLE-3). Legend: R rows, H draft hidden, d head width, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.cache.kv_cache import KVCache, KVShape
from eyas.config.engine import INT8
from eyas.config.file_values import get_setting
from eyas.device.placement import check_device, runs_compiled
from eyas.kernels.arguments import BYTES, LayerSlots, Projected
from eyas.kernels.by_device import layer_kernels
from eyas.kernels.plain.layers import take_rows
from eyas.models.backends.cpu import round_rows_of
from eyas.models.checkpoint import (
    EMBEDDING_NAMES,
    LM_HEAD_NAMES,
    WIRING_KEY,
    CheckpointSource,
    check_tensors,
    explained,
    open_checkpoint,
)
from eyas.models.heads.compiled import CompiledEagle
from eyas.models.heads.eagle_config import (
    DEPTH_KEY,
    EagleHeadConfig,
    HeadWiring,
    Kind,
    canonical_name,
    fuser_shapes,
    layer_prefix,
    read_head_config,
    tensor_shapes,
)
from eyas.models.heads.fusers import LinearFuser
from eyas.models.heads.layers import (
    FP8,
    BackboneSizes,
    DraftLayer,
    backbone_json,
    check_draft_vocabulary,
    default_rotary_table,
    draft_ids_of,
    frozen,
    linear,
    quantise_head,
    rms_norm,
    rotary_table,
    under_prefix,
    write_checkpoint,
)
from eyas.models.heads.slots import attend_slots, cache_and_attend, layer_slots
from eyas.models.inputs import PackedInputs

# Attention of one layer: its number and projected rows to the attention output [R, heads, d].
Attention = Callable[[int, Projected], Tensor]
# Where a layer's new keys and values belong, if they lie in slots.
SlotsOfLayer = Callable[[int], LayerSlots | None]


class EagleHead(nn.Module):
    """Decoder layers over pairs (feature i, token i+1). Each step's state takes the place of the next feature.

    P-EAGLE instead has parallel rows behind the last pair: `mask_feature` [H] and the embedding of a mask token.
    RoPE has the head's own base and covers the target's context. draft_ids maps draft ids to the target's.

    Args:
        tensors: under their published names.
        embedding, lm_head: the head's own or the target's.
    """

    num_modules = 1

    def __init__(
        self, config: EagleHeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor, max_model_len: int
    ) -> None:
        super().__init__()
        self.config, self.max_model_len = config, max_model_len
        self.embedding = frozen(embedding)
        self.lm_head = linear(lm_head)
        self.fc = linear(tensors["fc.weight"], tensors.get("fc.bias")) if config.kind == "eagle" else None
        self.norm = frozen(tensors["norm.weight"]) if "norm.weight" in tensors else None
        self.layers = nn.ModuleList(
            DraftLayer(config, under_prefix(tensors, layer_prefix(config, layer))) for layer in range(config.num_layers)
        )
        self.register_buffer("draft_ids", draft_ids_of(tensors, config.draft_vocab_size))
        self.register_buffer("rotary", head_rotary(config, max_model_len).to(embedding.dtype))
        mask = tensors.get("mask_hidden")
        self.register_buffer("mask_feature", None if mask is None else make_fuser(config, tensors)(mask.view(1, -1))[0])
        self.draft_ids: Tensor
        self.rotary: Tensor
        self.mask_feature: Tensor | None
        self.compiled: CompiledEagle | None = None

    @property
    def wiring(self) -> HeadWiring:
        """Return how the head is wired; validation tries others."""
        return self.config.wiring

    @wiring.setter
    def wiring(self, wiring: HeadWiring) -> None:
        self.config = replace(self.config, wiring=wiring)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of states, keys and values."""
        return self.embedding.dtype

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Return the shapes of the keys and values of each layer."""
        c = self.config
        return [KVShape(c.num_kv_heads, c.head_dim, c.head_dim)] * c.num_layers

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.config.num_heads

    def project(
        self, features: Tensor, tokens: Tensor, positions: Tensor, slots: SlotsOfLayer = lambda layer: None
    ) -> Projected:
        """Project into the first layer: features [R, H], tokens and positions [R]. slots: see DraftLayer."""
        inputs, residual = self.first_inputs(F.embedding(tokens, self.embedding), features)
        return self.layer(0).project(inputs, residual, self.rotary[positions], slots(0))

    def project_level(
        self, states: Tensor, parents: Tensor, tokens: Tensor, positions: Tensor, slots: SlotsOfLayer
    ) -> Projected:
        """Project rows of trees: states [S, R, H] of the rows above, parents among these and draft ids [S, W]."""
        first = self.layer(0)
        if self.fc is not None:
            features = take_rows(states, parents).flatten(0, 1)
            return self.project(features, self.draft_ids[tokens].flatten(), positions, slots)
        assert first.input_norm is not None
        assert first.hidden_norm is not None
        norms = first.input_norm, first.hidden_norm
        inputs, features = layer_kernels(states).pair_inputs(
            states, parents, tokens, self.draft_ids, self.embedding, norms, self.config.rms_norm_eps
        )
        residual = inputs[:, features.shape[1] :] if self.config.wiring.norm_before_residual else features
        return first.project(inputs, residual, self.rotary[positions], slots(0))

    def project_next(
        self, layer: int, states: Tensor, positions: Tensor, slots: SlotsOfLayer = lambda layer: None
    ) -> Projected:
        """Project into a later layer: states [R, H] of the one before it, positions [R]. slots: see DraftLayer."""
        below = self.layer(layer)
        assert below.input_norm is not None
        return below.project(self._rms(states, below.input_norm), states, self.rotary[positions], slots(layer))

    def finish(self, attended: Tensor, residual: Tensor, layer: int = -1) -> Tensor:
        """Finish a layer, the last by default: attention output [R, heads, d] and residual [R, H] to states [R, H]."""
        state = self.layer(layer).finish(attended, residual)
        feeds_norm = self.config.wiring.output == "normed" and layer in (-1, len(self.layers) - 1)
        return self._final_norm(state) if feeds_norm else state

    def run(self, features: Tensor, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run through all layers: features [R, H], tokens and positions [R] to states [R, H]."""
        return self.run_layers(self.project(features, tokens, positions), positions, attention)

    def run_slots(self, features: Tensor, packed: PackedInputs, kv_cache: KVCache) -> Tensor:
        """Run rows of features [R, H] and the tokens of a pass to states [R, H]; keys and values go to the rows' slots."""
        return self.run(features, packed.tokens, packed.positions, partial(attend_slots, kv_cache, packed))

    def run_pairs(self, features: Tensor, pairs: PackedInputs, last: PackedInputs, kv_cache: KVCache) -> Tensor:
        """Return the states [S, H] after the last pairs of sessions; the last layer runs these alone.

        Args:
            features: of all new pairs [R, H].
            last: `pairs` without the others.
        """
        slots, ends = pairs.slots, pairs.logits_indices
        to_slots = partial(layer_slots, kv_cache, pairs)
        rows = self.project(features, pairs.tokens, pairs.positions, to_slots)
        deepest = self.config.num_layers - 1
        for layer in range(deepest):
            attended = cache_and_attend(kv_cache, layer, rows, slots, rows.query, pairs)
            rows = self.project_next(layer + 1, self.finish(attended, rows.residual, layer), pairs.positions, to_slots)
        attended = cache_and_attend(kv_cache, deepest, rows, slots, rows.query[ends], last)
        return self.finish(attended, rows.residual[ends])

    def run_layers(
        self, rows: Projected, positions: Tensor, attention: Attention, slots: SlotsOfLayer = lambda layer: None
    ) -> Tensor:
        """Run from what the first layer's attention needs. slots: see DraftLayer."""
        states = self.finish(attention(0, rows), rows.residual, 0)
        for layer in range(1, len(self.layers)):
            rows = self.project_next(layer, states, positions, slots)
            states = self.finish(attention(layer, rows), rows.residual, layer)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return draft logits float32 [..., D] of states [..., H]."""
        return self.raw_logits(states).float()

    def raw_logits(self, states: Tensor) -> Tensor:
        """Return draft logits [..., D] of states [..., H], in the head's dtype."""
        normed = self._final_norm(states) if self.config.wiring.output == "state" else states
        return self.lm_head(normed)  # type: ignore[no-any-return]

    def first_inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the first layer's attention sees of embeddings and features [R, H], and its residual [R, H].

        EAGLE-1 and -2: fc joins the two, and there is no norm before attention. EAGLE-3: the two are normed and stand side
        by side, embedding first; fc runs beside the target.
        """
        # EAGLE-1 has fc [2 H, H] in front of its layer; its residual is what fc gives.
        if self.fc is not None:
            joined = self.fc(torch.cat([embedded, features], -1))
            return joined, joined
        first = self.layer(0)
        assert first.input_norm is not None
        assert first.hidden_norm is not None
        # EAGLE-3: the layer reads [embedding; features], 2 H wide, and adds to the features alone.
        normed = self._rms(features, first.hidden_norm)
        inputs = torch.cat([self._rms(embedded, first.input_norm), normed], -1)
        return inputs, normed if self.config.wiring.norm_before_residual else features

    def layer(self, layer: int) -> DraftLayer:
        """Return a layer by its number."""
        return cast(DraftLayer, self.layers[layer])

    def _final_norm(self, states: Tensor) -> Tensor:
        assert self.norm is not None
        return self._rms(states, self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)


def head_rotary(config: BackboneSizes, length: int) -> Tensor:
    """Return the head's rotary table, [length, 2, d].

    Raises CheckpointError for a scaling that transformers does not know.
    """
    if config.rotary["rope_type"] == "default":
        return default_rotary_table(config.rotary["rope_theta"], config.head_dim, length)
    from transformers import LlamaConfig

    with explained(f"the head's RoPE is {dict(config.rotary)}, which transformers cannot use"):
        llama = LlamaConfig(
            hidden_size=config.num_heads * config.head_dim,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rotary),
        )
        return rotary_table(llama, length)


def load_head(
    checkpoint: CheckpointSource,
    target: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
    kind: Kind = "eagle3",
    wiring: HeadWiring | None = None,
    quantization: str = "",
) -> EagleHead:
    """Load a head, with the target's embedding and lm_head where it has none of its own.

    Raises CheckpointError for tensors that are missing, left over or of another shape than the two configs imply, and
    ConfigError as `quantise_head`.

    Args:
        wiring: replaces what its config says.
        quantization: as `drafting.quantization`.
    """
    check_device(dtype, device)
    checkpoint, target = open_checkpoint(checkpoint), open_checkpoint(target)
    config = read_head_config(checkpoint, target.text_config, kind, wiring)
    rename = partial(canonical_name, kind=kind)
    tensors = checkpoint.tensors_of(rename, tensor_shapes(config), config.optional_tensors)
    check_draft_vocabulary(config.vocab_size, tensors, checkpoint.folder)
    embedding, lm_head = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
    shape = (config.vocab_size, config.target_hidden)
    embedding = target.vocabulary(EMBEDDING_NAMES, shape) if embedding is None else embedding
    lm_head = target.vocabulary(LM_HEAD_NAMES, shape) if lm_head is None else lm_head
    to = getattr(torch, dtype)
    cast = {name: tensor.to(to) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    max_model_len = get_setting(int, target.text_config, "max_position_embeddings", target.folder)
    head = EagleHead(config, cast, embedding.to(to), lm_head.to(to), max_model_len).to(torch.device(device))
    quantise_head(head, torch.device(device), quantization)
    if dtype == "float32" and kind != "peagle" and quantization != FP8 and runs_compiled(torch.device(device)):
        if quantization == INT8:
            round_rows_of(head.modules(), BYTES)
        head.compiled = CompiledEagle(head)
    return head


def load_fuser(
    checkpoint: CheckpointSource,
    target: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
    kind: Kind = "eagle3",
) -> LinearFuser:
    """Load only the part of an EAGLE-3 or P-EAGLE head that runs beside the target: fc and the norms before it.

    Raises CheckpointError.
    """
    checkpoint = open_checkpoint(checkpoint)
    config = read_head_config(checkpoint, open_checkpoint(target).text_config, kind)
    tensors = checkpoint.part_of(partial(canonical_name, kind=kind), fuser_shapes(config))
    own = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    return make_fuser(config, own).to(torch.device(device))


def make_fuser(config: EagleHeadConfig, tensors: Mapping[str, Tensor]) -> LinearFuser:
    """Return the part of an EAGLE-3 head that runs beside the target."""
    norms = [tensors[name] for name in fuser_shapes(config) if not name.startswith("fc.")]
    return LinearFuser(
        tensors["fc.weight"],
        config.aux_hidden_state_layers,
        tensors.get("fc.bias"),
        torch.stack(norms) if norms else None,
        config.rms_norm_eps,
    )


def write_head(folder: Path, config: EagleHeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors. The wiring is recorded under Eyas' own key.

    Raises CheckpointError for tensors that `config` does not imply.
    """
    settings = config_json(config) | {WIRING_KEY: asdict(config.wiring)}
    check_tensors(tensors, tensor_shapes(config), config.optional_tensors, folder)
    write_checkpoint(folder, settings, tensors)


def config_json(c: EagleHeadConfig) -> dict[str, Any]:
    """Return the head's config.json, without a wiring that no published key can express."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **backbone_json(c),
        "attention_bias": c.qkv_bias,
    }
    if c.kind == "eagle":
        return settings | {"bias": c.fc_bias}
    settings |= {
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_hidden_state_layers),
        "norm_before_residual": c.wiring.norm_before_residual,
        "norm_before_fc": c.input_norms == "joint",
        "fc_norm": c.input_norms == "each",
        "norm_output": c.wiring.output == "normed",
    }
    if c.kind == "peagle":
        settings |= {"architectures": ["PEagleDraftModel"], "parallel_drafting": True, "mask_token_id": c.mask_token_id}
        settings[DEPTH_KEY] = c.depth
    return settings
