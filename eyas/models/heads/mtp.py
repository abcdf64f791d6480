"""Native multi-token prediction (MTP): the modules that a target's own checkpoint brings along, as a draft head.

A module is shaped as an EAGLE-1 head (DeepSeek-V3, 2412.19437, section 2.2). Its decoder layer is one of the target's own
kind, run by transformers' class with our attention, so that experts and windows need nothing here. Legend: R rows, H hidden,
V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from eyas.cache.kv_cache import KVCache, KVShape
from eyas.config.engine import INT8
from eyas.config.mtp_layouts import LAYOUTS, MtpModules, find_modules, num_layers_of
from eyas.device.placement import check_device
from eyas.errors import CheckpointError
from eyas.models.checkpoint import (
    EMBEDDING_NAMES,
    LM_HEAD_NAMES,
    Checkpoint,
    CheckpointSource,
    explained,
    is_finite,
    open_checkpoint,
    shortened,
)
from eyas.models.heads.eagle_config import HeadWiring, recorded_wiring
from eyas.models.heads.layers import FP8, frozen, linear, quantise_head
from eyas.models.hidden_states import FINAL_NORM_OUTPUT, final_norm
from eyas.models.inputs import PackedInputs
from eyas.models.layers.attention import ATTENTION_NAME, register_attention
from eyas.models.layers.indexed import not_of_indexers, without_indexers
from eyas.models.layers.mixers import use_pools
from eyas.models.loading import adapt_model, help_layers, read_model_config
from eyas.models.supported import RECURRENT_LAYERS, Architecture, inspect_architecture
from eyas.models.target import TargetModel
from eyas.models.text_part import HEAD, architecture_class
from eyas.models.transformers_log import quiet_transformers

# What recursion feeds back is the normed state in the code of most engines. `eyas check head` measures the other way too.
STATED_WIRING = HeadWiring((FINAL_NORM_OUTPUT,), output="normed")
# Settings that say which layers have experts, for a model of one layer without and with experts.
EXPERT_LAYERS: Mapping[str, tuple[Any, Any]] = {
    "mlp_layer_types": (["dense"], ["sparse"]),
    "first_k_dense_replace": (1, 0),
    "num_dense_layers": (1, 0),
    "moe_layer_start_index": (1, 0),
    "moe_layer_end_index": (1, 0),
    "moe_layer_interval": (1, 1),
    "mlp_only_layers": ([0], []),
    "decoder_sparse_step": (1, 1),
}
# What the names of layers in the module's model begin with.
OWN_LAYERS = re.compile(r".*\blayers\.(?=0\.)")


@dataclass(frozen=True)
class MtpHeadConfig:
    """Sizes of a module. The vocabulary is the target's."""

    hidden: int
    draft_vocab_size: int
    num_layers: int = 1

    @property
    def vocab_size(self) -> int:
        """Return the target's vocabulary, which is all drafted."""
        return self.draft_vocab_size


class MtpInputs(nn.Module):
    """Norms of embedding and hidden state, and the projection of both.

    Args:
        norm: of the kind that the target has; its weight is replaced.
    """

    def __init__(self, norm: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.embedding_norm.weight = frozen(tensors["embedding_norm"])
        self.hidden_norm.weight = frozen(tensors["hidden_norm"])
        self.projection = linear(tensors["projection"], tensors.get("bias"))

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Join embeddings and hidden states [R, H] to the input of the layer [R, H]."""
        parts = [self.embedding_norm(embedded), self.hidden_norm(states)]
        joined: Tensor = self.projection(torch.cat(parts, -1))
        return joined


class MtpModule:
    """One module: what stands before its layer, the layer, and the norm before the output head.

    Args:
        model: a causal LM of one layer, with the module's final norm as `norm` of its decoder.
        number: of the layer of a KV cache that has its keys and values.
    """

    def __init__(self, model: Any, inputs: MtpInputs, number: int) -> None:
        self._inputs = inputs
        self._decoder = model.get_decoder()
        self.norm = final_norm(self._decoder)
        name = next(name for name, child in self._decoder.named_children() if child is self.norm)
        setattr(self._decoder, name, nn.Identity())  # the state before it may be the next feature
        for part in self.parts:
            if hasattr(part, "layer_idx"):
                part.layer_idx = number

    @property
    def parts(self) -> list[Any]:
        """Return the modules of its layers."""
        return [part for layer in self._decoder.layers for part in layer.modules()]

    def run(self, features: Tensor, embedded: Tensor, packed: PackedInputs, kv_cache: KVCache) -> Tensor:
        """Run rows of features and embeddings [R, H] to states [R, H] before the final norm."""
        found = self._decoder(
            inputs_embeds=self._inputs(embedded, features)[None],
            position_ids=packed.positions[None],
            use_cache=False,
            packed=packed,
            kv_cache=kv_cache,
        )
        return found.last_hidden_state[0]  # type: ignore[no-any-return]


class MtpHead:
    """Modules over pairs (feature i, token i + 1), as an EAGLE head is. Each step's state takes the place of the next
    feature.

    Keys and values of their rows lie in slots of a KV cache of their own, also for nodes of trees: layer k is module k's.
    draft_ids: int64 [V].

    Args:
        shared: a causal LM with the target's embedding and output head, and the sizes of a module's layer.
    """

    compiled = None

    def __init__(self, shared: TargetModel, modules: Sequence[MtpModule], wiring: HeadWiring) -> None:
        self._shared, self._modules, self.wiring = shared, modules, wiring
        self.config = MtpHeadConfig(int(shared.config.hidden_size), shared.vocab_size)
        self.draft_ids = torch.arange(shared.vocab_size, device=shared.device)

    @property
    def num_modules(self) -> int:
        """Return the number of modules, M."""
        return len(self._modules)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of states, keys and values."""
        return self._shared.dtype

    @property
    def max_model_len(self) -> int:
        """Return the number of positions that the target covers."""
        return self._shared.max_model_len

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Return the shapes of the keys and values of each module."""
        return self._shared.kv_shapes * self.num_modules

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self._shared.heads_per_kv * self.kv_shapes[0].num_heads

    @property
    def has_experts(self) -> bool:
        """Return whether rows of a pass go to different experts."""
        return any(hasattr(part, "experts") for part in self._modules[0].parts)

    @property
    def has_window(self) -> bool:
        """Return whether attention slides."""
        return any(getattr(part, "sliding_window", None) for part in self._modules[0].parts)

    def run_pairs(self, features: Tensor, pairs: PackedInputs, last: PackedInputs, kv_cache: KVCache) -> Tensor:
        """Return the first module's states [S, H] after the last pairs of sessions. `last` says nothing new."""
        return self.run_slots(features, pairs, kv_cache)[pairs.logits_indices]

    def run_slots(self, features: Tensor, packed: PackedInputs, kv_cache: KVCache) -> Tensor:
        """Run rows through the first module, see `run_module`."""
        return self.run_module(0, features, packed, kv_cache)

    def run_module(self, number: int, features: Tensor, packed: PackedInputs, kv_cache: KVCache) -> Tensor:
        """Run rows of features [R, H] and the tokens of a pass to states [R, H]; keys and values go to the rows' slots."""
        module = self._modules[number]
        embedded = self._shared.model.get_input_embeddings()(packed.tokens)
        states = module.run(features, embedded, packed, kv_cache)
        return module.norm(states) if self.wiring.output == "normed" else states

    def module_logits(self, number: int, states: Tensor) -> Tensor:
        """Return draft logits [..., V] of a module's states [..., H]."""
        normed = states if self.wiring.output == "normed" else self._modules[number].norm(states)
        return self._shared.model.get_output_embeddings()(normed)  # type: ignore[no-any-return]

    def raw_logits(self, states: Tensor) -> Tensor:
        """Return draft logits [..., V] of the first module's states [..., H]."""
        return self.module_logits(0, states)


def load_mtp_head(
    checkpoint: CheckpointSource,
    target: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
    wiring: HeadWiring | None = None,
    quantization: str = "",
) -> MtpHead:
    """Load the modules of a checkpoint, with the target's embedding and output head. No other tensor is read.

    Raises CheckpointError for a checkpoint without a module, and for tensors that are missing, left over, quantised or of
    another shape than the target's config implies; ConfigError as `quantise_head`.

    Args:
        checkpoint: the target's, or another one with a module for it.
        wiring: replaces what the checkpoint's config records.
        quantization: as `drafting.quantization`.
    """
    check_device(dtype, device)
    register_attention()
    checkpoint, target = open_checkpoint(checkpoint), open_checkpoint(target)
    config = read_model_config(target)
    found, wiring = require_modules(checkpoint), wiring or stated_wiring(checkpoint)
    shared: TargetModel | None = None
    modules = list[MtpModule]()
    read = cache(target.tensor)
    for number in range(found.count):
        model, architecture = _load_module(MtpFiles(checkpoint, target, found, number, read), config, dtype, device, shared)
        if quantization in (FP8, INT8):
            quantise_head(model, torch.device(device), quantization)
        adapt_model(model, getattr(torch, dtype), int(config.max_position_embeddings))
        shared = shared or TargetModel(model, architecture=architecture)
        modules.append(MtpModule(model, model.mtp_inputs, number))
    assert shared is not None, "there is a module"
    return MtpHead(shared, modules, wiring)


def _load_module(
    files: MtpFiles, config: Any, dtype: str, device: str, shared: TargetModel | None
) -> tuple[Any, Architecture]:
    """Return a causal LM of a module's layer, with what stands before it as `mtp_inputs`; and its architecture.

    shared: has the embedding and output head, for modules after the first.
    """
    own = module_config(config, files.layer, files.number)
    architecture = inspect_architecture(own)
    if architecture.states:
        raise CheckpointError(
            f"{files}: its module for multi-token prediction has recurrent layers, whose states Eyas keeps for targets. "
            "Set method to none"
        )
    model = _make_model(own, files, architecture, getattr(torch, dtype))
    if shared is not None:  # before the model moves to the device
        model.set_input_embeddings(shared.model.get_input_embeddings())
        model.set_output_embeddings(shared.model.get_output_embeddings())
    # a part of the model, so that it moves and is packed with it
    model.mtp_inputs = files.inputs(final_norm(model.get_decoder()), int(own.hidden_size)).to(getattr(torch, dtype))
    return model.to(torch.device(device)), architecture


def stated_wiring(checkpoint: Checkpoint) -> HeadWiring:
    """Return the wiring that a checkpoint's config records, or else the usual one."""
    return recorded_wiring(checkpoint.config, checkpoint.config_file) or STATED_WIRING


def require_modules(checkpoint: Checkpoint) -> MtpModules:
    """Return the modules of a checkpoint, numbered on from its own layers. Raises CheckpointError without one."""
    num_layers = num_layers_of(checkpoint.config, checkpoint.config_file)
    found = find_modules(checkpoint.files, num_layers)
    if found is None:
        tails = (layout.projection.format(n=num_layers if layout.counts_on else 0) for layout in LAYOUTS)
        raise CheckpointError(
            f"{checkpoint} holds no module for multi-token prediction: none of the tensors "
            f"{', '.join(f'{tail}.weight' for tail in tails)}. Copies with other weights often leave them out; name the "
            "original as draft_model, or take another method"
        )
    return found


def module_config(config: Any, tensors: Collection[str], number: int = 0) -> Any:
    """Return the config of a model whose layers are like the module's; a layer has experts if these tensors have some.

    Their kinds are those of `mtp_layer_types` or `mtp_layers_block_type`, where a config has one; else that of the target's
    last layer, or full attention if that layer is recurrent.
    """
    own = copy.deepcopy(config)
    num_layers = int(config.num_hidden_layers)
    has_experts = any("experts" in name for name in tensors)
    own.__dict__.pop("quantization_config", None)
    own.num_hidden_layers = 1
    for key, value in list(vars(own).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(own, key, value[-1:])
    if (types := getattr(config, "mtp_layer_types", None)) and getattr(config, "layer_types", None):
        own.layer_types = [types[min(number, len(types) - 1)]]
    elif blocks := getattr(config, "mtp_layers_block_type", None):
        own.layer_types = list(blocks)
    elif RECURRENT_LAYERS & set(getattr(own, "layer_types", None) or ()):
        own.layer_types = ["full_attention"]
    for key, values in EXPERT_LAYERS.items():
        if getattr(own, key, None) is not None:
            setattr(own, key, copy.copy(values[has_experts]))
    return own


class MtpFiles:
    """The tensors of a module in the files of a checkpoint. Raises CheckpointError for what is missing or no plain number.

    layer: names of the decoder layer's tensors in the files, by those within the layer. number: of the module, from 0.

    Args:
        target: which may have the final norm.
        read: reads the first tensor of some names from the target.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Checkpoint,
        modules: MtpModules,
        number: int,
        read: Callable[[tuple[str, ...]], Tensor],
    ) -> None:
        layout = modules.layout
        self.modules = modules
        self._checkpoint = checkpoint
        self._read = read
        self.number = number
        self.layer = modules.layer_tensors(not_of_indexers(checkpoint.files), number)
        parts = {"projection": layout.projection, "embedding_norm": layout.embedding_norm, "hidden_norm": layout.hidden_norm}
        self._parts = {key: f"{modules.name(template, number)}.weight" for key, template in parts.items()}
        final = modules.final_norm({*checkpoint.files, *target.files}, number)
        if missing := sorted({*self._parts.values(), final} - {*checkpoint.files, *target.files}):
            raise CheckpointError(
                f"{checkpoint} lacks tensors of its module for multi-token prediction: {shortened(missing)}"
            )
        bias = f"{modules.name(layout.projection, number)}.bias"
        self._parts |= {"bias": bias} if bias in checkpoint.files else {}
        wanted = {*self.layer.values(), *self._parts.values()}
        source = checkpoint if final in checkpoint.files else target
        self._stored = checkpoint.read(wanted) | source.read({final})
        self.final_norm = self._stored[final]
        self._check()

    def _check(self) -> None:
        for name, tensor in self._stored.items():
            self._check_plain(name, tensor)
            if not is_finite(tensor):
                raise CheckpointError(f"{self._checkpoint}: {name} holds NaN or infinity; take undamaged weights")

    def _check_plain(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise CheckpointError(
                f"{self._checkpoint}: {name} has dtype {tensor.dtype}, and Eyas drafts with plain weights; name a "
                "checkpoint with plain modules as draft_model, or set method to none"
            )

    def __str__(self) -> str:
        return str(self._checkpoint)

    def weights(self, layers: str, architecture: Architecture, has_head: bool) -> dict[str, Tensor]:
        """Return the tensors of a causal LM whose layers are the module's.

        Args:
            layers: what the names of their tensors begin with.
            has_head: whether the output head is not tied to the embedding.
        """
        found = {layers + own: self._stored[name] for own, name in self.layer.items()}
        others = {name: shape for name, shape in architecture.tensors.items() if not name.startswith(layers)}
        for name in others.keys() - {HEAD}:  # a norm is a vector
            found[name] = self.final_norm if len(others[name]) == 1 else self._shared(EMBEDDING_NAMES)
        return found | ({HEAD: self._shared(LM_HEAD_NAMES)} if has_head else {})

    def _shared(self, names: tuple[str, ...]) -> Tensor:
        tensor = self._read(names)
        self._check_plain(names[0], tensor)
        return tensor

    def inputs(self, norm: nn.Module, hidden: int) -> MtpInputs:
        """Return what stands before the layer. norm: of the kind that the target has."""
        tensors = {key: self._stored[name] for key, name in self._parts.items()}
        widths = {"projection": (2 * hidden,)}
        for key, tensor in tensors.items():
            if tuple(tensor.shape) != (shape := (hidden, *widths.get(key, ()))):
                raise CheckpointError(
                    f"{self._checkpoint}: {self._parts[key]} has shape {list(tensor.shape)}, but the target's config "
                    f"implies {list(shape)}"
                )
        return MtpInputs(norm, tensors)


def _make_model(config: Any, files: MtpFiles, architecture: Architecture, dtype: torch.dtype) -> Any:
    """Return a causal LM of the module's layer. Raises CheckpointError with the names of tensors that do not fit."""
    from transformers import GenerationConfig

    layers = next(match[0] for name in architecture.tensors if (match := OWN_LAYERS.match(name)))
    no_defaults: Any = GenerationConfig
    what = f"transformers cannot load the module for multi-token prediction of {files}"
    with explained(what), quiet_transformers(), without_indexers(config):
        model, report = architecture_class(config).from_pretrained(
            None, config=config, state_dict=files.weights(layers, architecture, not config.tie_word_embeddings),
            dtype=dtype, attn_implementation=ATTENTION_NAME, generation_config=no_defaults(), ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
    layout = files.modules.layout
    named = f"{files.modules.name(layout.layer, files.number)}."
    layer = f"{layers}0." if layout.is_numbered else layers
    problems = [
        f"{what} {shortened(sorted(name.replace(layer, named) for name in names))}"
        for what, names in (
            ("missing", report["missing_keys"]),
            ("unexpected", report["unexpected_keys"]),
            ("of another shape", [name for name, *_ in report["mismatched_keys"]]),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{files}: the module for multi-token prediction does not fit the target's config: {'; '.join(problems)}. Take "
            "undamaged weights, or set method to none"
        )
    model.name_or_path = str(files)
    help_layers(model.get_decoder(), architecture)
    return use_pools(model)
