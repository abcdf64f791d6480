"""The target model: any causal LM of transformers whose layers all attend, run over packed rows with our attention.

No list of model names decides what is supported: a forward pass without weights shows what an architecture needs. What a
family of models needs from Eyas goes into `_adapt` and into the tables below. Legend: R packed rows, N rows whose logits
are computed, V vocabulary, C hidden width, T layers whose hidden states are collected.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyas.cache.kv_cache import KV_CACHE_DTYPES, KVCache, KVScales
from eyas.errors import CheckpointError, ConfigError
from eyas.file_values import shown
from eyas.models.attention import ATTENTION_NAME, kv_sources, register_attention
from eyas.models.checkpoint import (
    EMBEDDING_NAMES,
    TABLE,
    TEXT_LAYER,
    WEIGHT_FILES,
    WeightFiles,
    cause,
    check_device,
    check_layers,
    check_quantisation,
    context_length,
    explained,
    is_finite,
    read_config,
    read_kv_scales,
    read_target_config,
    resolve,
    shortened,
    stored_shapes,
    weight_map,
)
from eyas.models.cpu import (
    MergedLinearPart,
    PackedEmbedding,
    PackedLinear,
    copy_stored_weights,
    optimize_for_cpu,
)
from eyas.models.fused import fuse_layers, unfuse_layers
from eyas.models.generation_config import end_tokens
from eyas.models.heads.layers import E4M3_CAPABILITY, FINAL_NORM_OUTPUT
from eyas.models.inputs import PackedInputs, Segment, StateHooks, pack
from eyas.models.numerics import pin_rotary, use_float32_head
from eyas.models.tensor_parallel import (
    LM_HEAD,
    Shard,
    SharedVocabulary,
    load_shard,
    shard_model,
    shares_vocabulary,
    splits_heads,
    tie_head,
    weightless_model,
)
from eyas.target_limits import check_ranks, quantisation

RECORDING_ATTENTION = "eyas_recording"
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
SUPPORTED_ARGUMENTS = {"scaling", "sliding_window", "softcap"}
IGNORED_ARGUMENTS = {"dropout", "position_ids", "cache_position"}
# First NVIDIA GPUs that convert to and from float8_e4m3.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Settings whose value may show in a tensor's shape.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetOutput:
    """logits: float32 [N, V]; of a rank that shares the vocabulary, those of its part.

    aux_hidden_states: collected hidden states side by side [R, T * C], or None: also if the KV cache has got them.
    """

    logits: Tensor
    aux_hidden_states: Tensor | None


class TargetModel:
    """A loaded causal LM. It is the plain ForwardBackend.

    aux_hidden_state_layers: layers whose *input* is collected (the convention of EAGLE-3). The number of layers means the
    state before the final norm, FINAL_NORM_OUTPUT the state behind it.
    """

    def __init__(
        self,
        model: Any,
        aux_hidden_state_layers: Sequence[int] = (),
        shard: Shard | None = None,
        kv_shapes: Sequence[tuple[int, int]] | None = None,
        hooks: StateHooks | None = None,
    ) -> None:
        """shard: the part of the model that this process holds. kv_shapes: of the whole model; None measures them. hooks: of
        another target on the same model."""
        self.model: Any = model.eval()
        self.name_or_path: str = model.name_or_path
        self.config: Any = model.config.get_text_config()
        self.device: torch.device = next(model.parameters()).device
        # Of hidden states, keys and values; quantised and packed weights have another.
        embedding = model.get_input_embeddings()
        self.dtype: torch.dtype = embedding.dtype if isinstance(embedding, PackedEmbedding) else embedding.weight.dtype
        self.vocab_size = int(self.config.vocab_size)
        self.max_model_len = int(self.config.max_position_embeddings)
        self.eos_ids = _eos_ids(model)
        self._whole_kv_shapes = kv_shapes
        self.kv_scales: Sequence[KVScales] = ()  # of keys and values with 8 bits, by layer; empty for 1
        self.kv_dtype: torch.dtype | None = None  # of keys and values, if not `dtype`
        self._num_ranks = shard.size if shard else 1
        self._num_head_ranks = shard.size if shard and splits_heads(model) else 1
        self.shared_vocabulary: SharedVocabulary | None = None
        if shard and shares_vocabulary(model, shard):
            self.shared_vocabulary = SharedVocabulary(shard, self.vocab_size)
        self._hooks = hooks or StateHooks(self.model)
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.set_aux_hidden_state_layers(aux_hidden_state_layers)

    def with_features(self, aux_hidden_state_layers: Sequence[int] = ()) -> TargetModel:
        """Another target on the same weights and scales, which collects these layers. Only for a whole model on one rank."""
        assert self._num_ranks == 1, "ranks share one target"
        other = TargetModel(self.model, aux_hidden_state_layers, kv_shapes=self._whole_kv_shapes, hooks=self._hooks)
        other.kv_scales = self.kv_scales
        return other

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Collect the hidden states of these layers from now on. Raises CheckpointError for a layer that does not exist."""
        num_layers = len(self.model.get_decoder().layers) if layers else 0
        for layer in layers:
            if layer != FINAL_NORM_OUTPUT and not 0 <= layer <= num_layers:
                raise CheckpointError(
                    f"the draft head reads the hidden state of layer {layer}, but the target has {num_layers} layers; "
                    "take a head that was trained for this target"
                )
        self.aux_hidden_state_layers = tuple(layers)
        self._hooks.use(self.aux_hidden_state_layers)

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Segments in the form that `forward` takes, for the plain attention."""
        return pack(segments, self.device)

    @torch.inference_mode()
    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """Run all rows once; new keys and values go to the rows' slots in `kv_cache`."""
        self._hooks.states = {}  # a pass that failed may have left some
        if self._hooks.layers != self.aux_hidden_state_layers:
            self._hooks.use(self.aux_hidden_state_layers)
        out = self.model(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            logits_to_keep=packed.logits_indices,
            packed=packed,
            kv_cache=kv_cache,
        )
        found, self._hooks.states = self._hooks.states, {}
        states = [found[layer] for layer in self.aux_hidden_state_layers] if found else []
        return TargetOutput(out.logits[0].float()[: packed.num_logits], torch.cat(states, dim=-1) if states else None)

    def on_any_rank(self, found: bool) -> bool:
        """Whether something was found on this rank or another that shares the target; all must ask at the same time."""
        if self._num_ranks == 1:
            return found
        verdict = torch.tensor([float(found)], device=self.device)
        dist.all_reduce(verdict, dist.ReduceOp.MAX)
        return bool(verdict)

    def new_kv_cache(self, num_slots: int, feature_width: int = 0) -> KVCache:
        """An empty KV cache of this rank's heads."""
        shapes, scales = self.kv_shapes, self.kv_scales
        sources = kv_sources(self.config)
        return KVCache(num_slots, shapes, feature_width, self.dtype, self.device, self.kv_dtype, scales, sources)

    def set_kv_cache_dtype(self, name: str) -> None:
        """Keep keys and values as `engine.kv_cache_dtype` says in KV caches that are made from now on.

        With 8 bits the checkpoint's scales are read, unless there are some. Raises ConfigError for a type that the device
        does not have, and CheckpointError as `read_kv_scales`.
        """
        self.kv_dtype = KV_CACHE_DTYPES.get(name)
        if self.kv_dtype == torch.float8_e4m3fn and self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            if capability < E4M3_CAPABILITY:
                gpu = torch.cuda.get_device_name(self.device)
                raise ConfigError(
                    f"engine.kv_cache_dtype is {name}, which {gpu} does not have: its compute capability is "
                    f"{capability[0]}.{capability[1]}, and 8.9 is the first. Set it to fp8_e5m2 or auto"
                )
        if self.kv_dtype is not None and not self.kv_scales:
            self.kv_scales = read_kv_scales(resolve(self.name_or_path), len(self.kv_shapes))

    @cached_property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(key-value heads, head width) of every layer; the heads of this rank."""
        shapes = self._whole_kv_shapes or measure_kv_shapes(self.model.config)
        return [(max(1, heads // self._num_head_ranks), width) for heads, width in shapes]

    @property
    def heads_per_kv(self) -> int:
        """Query heads of this rank that share a key-value head."""
        return int(self.config.num_attention_heads) // self._num_head_ranks // self.kv_shapes[0][0]

    @property
    def is_mixture_of_experts(self) -> bool:
        """Whether rows of one pass go to different experts."""
        return any(getattr(self.config, name, None) for name in EXPERT_COUNTS)


def _eos_ids(model: Any) -> frozenset[int]:
    """Every end-of-sequence token of the vocabulary that the model's generation config or config names."""
    found: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    text = model.config.get_text_config()
    found = found if found is not None else text.eos_token_id
    ids = found if isinstance(found, list) else [found] if found is not None else []
    return frozenset(token for token in ids if 0 <= token < text.vocab_size)


def load_target(
    path_or_id: str,
    dtype: str = "float32",
    device: str = "cpu",
    aux_hidden_state_layers: Sequence[int] = (),
    max_model_len: int = 0,
    shard: Shard | None = None,
) -> TargetModel:
    """Load a causal LM from a folder or hub id.

    max_model_len: tokens that rotary tables must serve; 0 takes the model's. shard: this process's part of the weights, if
    other ranks hold the rest; all ranks must load at the same time.
    Before any weight is read, raises CheckpointError for an architecture that is not supported, and ConfigError for a
    max_model_len above the model's. Raises CheckpointError for missing weights.
    """
    register_attention()
    check_device(dtype, device)
    folder = resolve(path_or_id)
    check_quantisation(read_config(folder), path_or_id, device)
    config = read_model_config(folder)
    if any((folder / name).exists() for name in WEIGHT_FILES):
        check_layers(weight_map(folder), config, folder / "config.json")
    architecture = _inspect(config, folder)
    shapes = architecture.kv_shapes
    longest = context_length(config, max_model_len, path_or_id)
    _check_shapes(architecture.tensors, config, folder)
    ends = end_tokens(folder, config)
    model = _load_parts(config, folder, dtype, device, shard, [heads for heads, _ in shapes])
    if model is None:
        model = _load_weights(config, folder, path_or_id, dtype)
        if shard is not None:
            shard_model(model, shard, [heads for heads, _ in shapes])
    model.name_or_path = path_or_id
    model.generation_config.eos_token_id = ends
    target = TargetModel(model.to(torch.device(device)), aux_hidden_state_layers, shard, shapes)
    if target.shared_vocabulary is not None:
        target.shared_vocabulary.warm_up(target.device)
    _adapt(target, longest)
    _fuse(target, _check_attention(target))
    return target


def target_of(model: Any) -> TargetModel:
    """A target over the weights of a causal LM that transformers has loaded; `model` stays as it is. Raises CheckpointError.

    Modules are copied, parameters shared. Layers run unfused, because fused ones have weights of their own.
    """
    register_attention()
    shared = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in shared.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    shared.set_attn_implementation(ATTENTION_NAME)
    target = TargetModel(shared, kv_shapes=measure_kv_shapes(read_model_config(resolve(model.name_or_path))))
    pin_rotary(shared, target.max_model_len)
    use_float32_head(shared)
    target.config.pad_token_id = None
    _check_attention(target)
    return target


def _fuse(target: TargetModel, expected: Tensor) -> None:
    """Fuse the layers if that leaves the logits of the check pass as they are, but for rounding.

    A new version of transformers may change a layer whose code we know. On CUDA, too, the check pass takes the plain
    operations between the products; `eyas.models.cuda.backend.check_kernels` compares the kernels with them. Each rank sees
    the logits of its own part of the vocabulary, and all fuse or none does.
    """
    is_fused = fuse_layers(target.model)
    if target.on_any_rank(not is_fused):
        if is_fused:
            unfuse_layers(target.model)
        return
    tolerance = 1e-3 if target.dtype == torch.float32 else 0.1
    try:
        error = float((_check_attention(target) - expected).abs().max())
    except CheckpointError:
        error = math.nan
    if target.on_any_rank(not error <= tolerance * float(expected.abs().max())):
        log.warning("%s: its layers run unfused, because fused ones compute something else", type(target.model).__name__)
        unfuse_layers(target.model)


def _adapt(target: TargetModel, max_model_len: int) -> None:
    """Change what transformers' model does, where packed rows over token slots or exact logits need it."""
    target.config.pad_token_id = None  # some architectures look for padding in every pass, which waits for the device
    pin_rotary(target.model, max_model_len)
    optimize_for_cpu(target.model, target.dtype)
    use_float32_head(target.model)


def read_model_config(folder: Path) -> Any:
    """transformers' config of a checkpoint, without a padding token beyond the vocabulary. Raises CheckpointError."""
    from transformers import AutoConfig

    raw, file = read_config(folder), folder / "config.json"
    if raw.get("model_type") is None:
        raise CheckpointError(f"{file}: model_type is left out; it names the architecture, such as llama")
    try:
        with explained(f"transformers cannot read the config of {str(folder)!r}"):
            config = AutoConfig.from_pretrained(folder)
    except CheckpointError as error:
        raise _named(error, file, raw, _make_config) from error.__cause__
    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    if padding is not None and not 0 <= padding < text.vocab_size:
        log.warning("%s: pad_token_id is %s, which the vocabulary of %d does not have; it is not used", file, padding,
                    text.vocab_size)  # fmt: skip
        text.pad_token_id = None
    return config


def _make_config(values: Mapping[str, Any]) -> Any:
    """transformers' config of these values."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


def _named(
    error: CheckpointError, file: Path, values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], object]
) -> CheckpointError:
    """The error with the setting of a config.json that causes it: the first without which `make` raises nothing."""
    with _quiet():
        culprit = _culprit(values, make)
    if not culprit:
        return error
    reason = cause(error.__cause__) if error.__cause__ else str(error)
    return CheckpointError(f"{file}: {culprit}, which {file.parent.name} cannot be loaded with: {reason}")


def _culprit(values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], object]) -> str:
    """The first setting without which `make` works, with its value; empty if there is none, as for unknown architectures."""
    for key in sorted(values.keys() - {"model_type"}):
        try:
            make({name: value for name, value in values.items() if name != key})
        except Exception:
            continue
        inner = values[key]
        if isinstance(inner, dict):
            deeper = _culprit(inner, lambda rest, key=key: make({**values, key: rest}))  # type: ignore[misc]
            return f"in {key} {deeper}" if deeper else f"{key} is {shown(inner)}"
        return f"{key} is {shown(inner)}"
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the block transformers logs errors only: what it reports of weights, errors of Eyas say in a line."""
    from transformers.utils import logging as verbosity

    before = verbosity.get_verbosity()
    verbosity.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        verbosity.set_verbosity(before)


def _inspect(config: Any, folder: Path) -> Architecture:
    """`inspect_architecture` of the config in a folder. Its error names the setting that causes it, if one does."""
    try:
        return inspect_architecture(config)
    except CheckpointError as error:
        file = folder / "config.json"
        if error.__cause__ is None:  # an architecture that Eyas does not serve, whatever its settings
            raise CheckpointError(f"{file}: {error}") from None
        raise _named(error, file, read_config(folder), lambda values: _trace(_make_config(values))) from error.__cause__


def _check_shapes(expected: Mapping[str, tuple[int, ...]], config: Any, folder: Path) -> None:
    """Raises CheckpointError for the first stored tensor whose shape or kind of numbers is not what the config implies.

    Looks at tensors that have the architecture's own names; transformers renames others. Quantised ones have other shapes.
    """
    if quantisation(config):
        return
    stored = stored_shapes(folder)
    for name, (shape, is_float) in sorted(stored.items(), key=lambda item: item[0] not in EMBEDDING_NAMES):
        wanted = expected.get(name)
        if wanted is not None and shape != wanted:
            text = config.get_text_config()
            sizes = [f"{key} {value}" for key in SIZES if (value := getattr(text, key, None)) in set(wanted) - set(shape)]
            implied = f" ({', '.join(sizes)})" if sizes else ""
            raise CheckpointError(
                f"{folder / 'config.json'}: {name} has shape {list(shape)}, but the config implies {list(wanted)}{implied}"
            )
        if not is_float and not TABLE.search(name) and (wanted is not None or TEXT_LAYER.fullmatch(name)):
            raise CheckpointError(f"{folder}: {name} does not hold plain floating-point numbers, and the config names no "
                                  "quantization_config")  # fmt: skip


def _load_parts(
    config: Any, folder: Path, dtype: str, device: str, shard: Shard | None, kv_heads: Sequence[int]
) -> Any | None:
    """transformers' model whose weights are read from the files one by one: a rank's part of them, or all for the CPU, where
    they are packed. None for a whole model on another device, and where the files cannot be read in parts.
    """
    from transformers import AutoModelForCausalLM

    if shard is None and device != "cpu":
        return None
    architecture: Any = AutoModelForCausalLM
    weights = getattr(torch, dtype)
    make_model = partial(architecture.from_config, config, dtype=weights, attn_implementation=ATTENTION_NAME)
    files = WeightFiles(folder, weights, device)
    if shard is None:
        model = _load_packed(make_model, files)
    elif (model := load_shard(make_model, files, torch.device(device), shard, kv_heads)) is None:
        log.warning("%s: each rank reads all weights into memory before it takes its part", folder)
    else:
        log.info("rank %d of %d has read %.2f GiB of weights", shard.rank, shard.size, files.bytes_read / 2**30)
    return model


def _load_packed(make_model: Callable[[], Any], files: WeightFiles) -> Any | None:
    """A causal LM on the CPU that is packed straight from the files; None as `weightless_model`."""
    found = weightless_model(make_model, files)
    if found is None:
        return None
    model, names = found
    for own, name in names.items():
        path, _, key = own.rpartition(".")
        stored = files.map(name)
        stored = stored if files.dtype == torch.float32 else stored.to(files.dtype)
        setattr(model.get_submodule(path), key, nn.Parameter(stored, requires_grad=False))
    tie_head(model, names)
    _warn_of_unused(files.names - set(names.values()) - {LM_HEAD}, files.folder)
    optimize_for_cpu(model, files.dtype)
    copy_stored_weights(model, files.dtype)
    return model


def _load_weights(config: Any, folder: Path, path_or_id: str, dtype: str) -> Any:
    """transformers' model with all of its weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]  # in a log it is noise, and on a full disk it raises
    architecture: Any = AutoModelForCausalLM
    no_defaults: Any = GenerationConfig
    with explained(f"transformers cannot load a causal LM from {path_or_id!r}"), _quiet():
        model, report = architecture.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME,
            generation_config=no_defaults(), ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    if mismatched := sorted(report["mismatched_keys"]):
        name, shape, wanted = mismatched[0]
        raise CheckpointError(f"{path_or_id!r}: {name} has shape {list(shape)}, but its config implies {list(wanted)}")
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{path_or_id!r} lacks tensors that its config asks for: {shortened(missing)}")
    _warn_of_unused(report["unexpected_keys"], path_or_id)
    return model


def _warn_of_unused(names: Iterable[str], source: object) -> None:
    if unused := sorted(name for name in names if not TABLE.search(name)):
        log.warning("%s: its config asks for no tensor of the names %s; they are not used", source, shortened(unused))


def _check_attention(target: TargetModel) -> Tensor:
    """Logits of a small pass [2, V].

    Raises CheckpointError unless every layer stores its keys through our attention and only asked rows get logits. An
    architecture that ignores arguments which it does not know would give wrong results without an error.
    """
    name = type(target.model).__name__
    kv_cache = target.new_kv_cache(4)
    rows, none = np.arange(2), np.zeros(0, dtype=np.int64)
    segments = [Segment(rows + 1, rows, rows + start, none, None, rows[1:]) for start in (0, 2)]
    with explained(f"{name} does not work with packed rows over token slots"):
        logits = target.forward(target.pack(segments), kv_cache).logits
    if len(logits) != 2 or not all(bool(keys.any()) for keys in kv_cache.keys):
        raise CheckpointError(f"{name} does not use transformers' attention interface in every layer; Eyas cannot serve it")
    _check_finite(target, logits)
    return logits


def _check_finite(target: TargetModel, logits: Tensor) -> None:
    """Raises CheckpointError for logits that are NaN or infinite, with the weights that are."""
    if is_finite(logits):
        return
    wrong = [name for name, weight in target.model.named_parameters() if not is_finite(weight)]
    wrong += [
        f"{name}.weight"
        for name, module in target.model.named_modules()
        if isinstance(module, PackedLinear | MergedLinearPart | PackedEmbedding) and not is_finite(module.weight)
    ]
    what = f"{shortened(wrong)} hold NaN or infinity" if wrong else "its layers compute NaN or infinity"
    raise CheckpointError(f"{target.name_or_path!r} as {target.dtype}: {what}; take undamaged weights, or another dtype")


def check_tensor_parallel(path_or_id: str, num_ranks: int) -> None:
    """Raises CheckpointError unless the ranks can split the heads of a target evenly."""
    check_ranks(num_ranks, read_target_config(resolve(path_or_id)))


@dataclass(frozen=True)
class AttentionCall:
    """How an architecture calls attention in one layer. arguments: names of those that are set and not booleans."""

    layer: int
    num_kv_heads: int
    key_width: int
    value_width: int
    arguments: frozenset[str]
    causal: bool


@dataclass(frozen=True)
class Architecture:
    """What a config builds: (key-value heads, head width) of every layer, and the shape of every parameter."""

    kv_shapes: list[tuple[int, int]]
    tensors: Mapping[str, tuple[int, ...]]


def measure_kv_shapes(config: Any) -> list[tuple[int, int]]:
    """(key-value heads, head width) of every layer, see `inspect_architecture`."""
    return inspect_architecture(config).kv_shapes


def inspect_architecture(config: Any) -> Architecture:
    """What an architecture needs, measured by a forward pass without weights.

    Raises CheckpointError with the reason for an architecture that is not supported.
    """
    name = config.model_type
    _check_architecture(config)
    with explained(f"{name} does not work with packed rows over token slots"):
        found, model = _trace(config)
    calls = sorted(found, key=lambda call: call.layer)
    missing = set(range(config.get_text_config().num_hidden_layers)) - {call.layer for call in calls}
    if missing:
        raise CheckpointError(f"{name}: layers {sorted(missing)} do not attend to the text through transformers' interface")
    if len({call.layer for call in calls}) < len(calls):
        raise CheckpointError(f"{name}: a layer attends more than once, but Eyas keeps one set of keys per layer")
    for call in calls:
        _check_call(name, call)
    shapes = [(call.num_kv_heads, call.key_width) for call in calls]
    return Architecture(shapes, {own: tuple(weight.shape) for own, weight in model.named_parameters()})


def _check_architecture(config: Any) -> None:
    from transformers import AutoModelForCausalLM

    name, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise CheckpointError(f"{name} is an encoder-decoder or cross-attends; Eyas serves decoder-only models")
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise CheckpointError(f"{name} has no causal language model in transformers")
    architecture = mapping[type(config)]
    architecture = architecture[0] if isinstance(architecture, tuple) else architecture
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYERS)
    recurrent = [kind for kind in unknown if kind in RECURRENT_LAYERS]
    if recurrent or architecture._is_stateful:
        raise CheckpointError(
            f"{name} has recurrent layers{_listed(recurrent)}: their state cannot branch over a draft tree or be kept by "
            "token slots; Eyas serves models whose layers all attend"
        )
    if unknown:
        raise CheckpointError(f"{name} has layers of types that Eyas does not support:{_listed(unknown)}")
    if not architecture._supports_attention_backend:
        raise CheckpointError(f"{name}: {architecture.__name__} does not go through transformers' attention interface")


def _trace(config: Any) -> tuple[list[AttentionCall], Any]:
    """Every attention call of a forward pass of two rows on the meta device, and the model."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(RECORDING_ATTENTION, _recording_attention)
    bare = copy.deepcopy(config)
    bare.__dict__.pop("quantization_config", None)
    bare.get_text_config().pad_token_id = None  # some look for padding among the tokens, which have no values here
    calls: list[AttentionCall] = []
    rows = torch.tensor([[0, 1]], device="meta")
    with torch.device("meta"), torch.inference_mode():
        architecture: Any = AutoModelForCausalLM
        model = architecture.from_config(bare, attn_implementation=RECORDING_ATTENTION, dtype=torch.bfloat16)
        pin_rotary(model, 0)
        model.eval()(input_ids=rows, position_ids=rows, use_cache=False, logits_to_keep=rows[0, :1], calls=calls)
    return calls, model


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *_: Any,
    calls: list[AttentionCall] | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Takes the place of attention and records how it is called."""
    if calls is None:
        raise TypeError("its layers do not pass keyword arguments on to attention")
    arguments["attention_mask"] = attention_mask
    given = frozenset(name for name, value in arguments.items() if value is not None and not isinstance(value, bool))
    layer: Any = module.layer_idx
    causal = bool(getattr(module, "is_causal", True))
    calls.append(AttentionCall(int(layer), key.shape[1], key.shape[-1], value.shape[-1], given, causal))
    return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None


def _check_call(name: str, call: AttentionCall) -> None:
    unknown = sorted(call.arguments - SUPPORTED_ARGUMENTS - IGNORED_ARGUMENTS)
    if "s_aux" in unknown:
        raise CheckpointError(f"{name} uses attention sinks, which Eyas does not support")
    if unknown:
        raise CheckpointError(f"{name} gives attention arguments that Eyas does not support:{_listed(unknown)}")
    if call.key_width != call.value_width:
        raise CheckpointError(
            f"{name} uses latent attention: keys of width {call.key_width}, values of width {call.value_width}; "
            "Eyas keeps keys and values of one width"
        )
    if not call.causal:
        raise CheckpointError(f"{name} attends in both directions; Eyas serves causal models")


def _listed(names: Iterable[str]) -> str:
    return "".join(f" {name}" for name in names)
