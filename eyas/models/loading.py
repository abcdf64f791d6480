"""Loads targets: config, weights, fused layers, and a check of the attention that runs."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eyas.config.engine import INT8
from eyas.config.mtp_layouts import find_modules
from eyas.config.target_limits import check_ranks, num_chosen_keys, quantisation
from eyas.device.placement import check_device
from eyas.errors import CheckpointError
from eyas.models.backends.packed_weights import (
    copy_stored_weights,
    optimize_for_cpu,
)
from eyas.models.checkpoint import (
    EMBEDDING_NAMES,
    TABLE,
    TEXT_LAYER,
    WEIGHT_FILES,
    Checkpoint,
    CheckpointSource,
    WeightFiles,
    check_layers,
    check_quantisation,
    context_length,
    explained,
    open_checkpoint,
    shortened,
    stored_shapes,
)
from eyas.models.generation_config import end_tokens
from eyas.models.layers.attention import ATTENTION_NAME, register_attention, set_windows
from eyas.models.layers.fused import fuse_layers, unfuse_layers
from eyas.models.layers.indexed import not_of_indexers, without_indexers
from eyas.models.layers.mixers import use_pools
from eyas.models.layers.numerics import pin_rotary, use_float32_head
from eyas.models.layers.relay import relay_arguments
from eyas.models.parallel.shards import (
    LM_HEAD,
    Shard,
    load_shard,
    shard_model,
    tie_head,
    weightless_model,
)
from eyas.models.pass_checks import check_attention, check_rows, tolerance_of
from eyas.models.setting_errors import with_setting
from eyas.models.supported import Architecture, inspect_architecture, trace_attention
from eyas.models.target import PASS_ARGUMENTS, TargetModel
from eyas.models.text_part import (
    OTHER_NAMES,
    StoredNames,
    auto_class,
    drop_padding,
    find_stored_names,
    is_nested,
    text_part,
)
from eyas.models.transformers_log import quiet_transformers

# Settings whose value may show in a tensor's shape.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim")

log = logging.getLogger(__name__)


def load_target(
    source: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
    aux_hidden_state_layers: Sequence[int] = (),
    max_model_len: int = 0,
    shard: Shard | None = None,
    passes: str = "",
) -> TargetModel:
    """Load a causal LM from a folder or hub id. Raises CheckpointError for missing weights.

    Args:
        dtype: of the weights. INT8 rounds the weights of linear layers to 8 bits, see `check_int8`.
        max_model_len: tokens that rotary tables must serve; 0 takes the model's.
        shard: this process's part of the weights, if other ranks hold the rest; all ranks must load at the same time.
            Before any weight is read, raises CheckpointError for an architecture that is not supported, and ConfigError for
            a max_model_len above the model's.
        passes: the dtype that passes compute in; empty takes that of the weights, see `pass_dtype`.
    """
    register_attention()  # models are made with its name, already to inspect their architecture

    # Everything that the config and the headers of the files can refute comes before the first weight, which takes minutes.
    check_device(passes if dtype == INT8 else dtype, device)
    checkpoint = open_checkpoint(source)
    check_quantisation(checkpoint.config, checkpoint.path, device)
    config = read_model_config(checkpoint)
    if _has_weights(checkpoint):
        check_layers(checkpoint.files, config, checkpoint.config_file)
    architecture = _inspect(config, checkpoint)
    kv_heads = [shape.num_heads for shape in architecture.kv_shapes]
    longest = context_length(config, max_model_len, checkpoint.path)
    _report_limit(config, longest, checkpoint.path)
    names = stored_names(config, checkpoint, architecture.tensors)
    _check_shapes(architecture.tensors, config, checkpoint, names)
    ends = end_tokens(checkpoint.folder, config)

    computed = getattr(torch, passes or dtype)
    to_bytes = dtype == INT8
    files = WeightFiles(checkpoint, computed if to_bytes else getattr(torch, dtype), device, names.own if names else None)
    model = _load_parts(config, files, computed, to_bytes, shard, kv_heads)
    if model is None:
        model = _load_weights(config, checkpoint, files.dtype, names)
        model = _placed(model, files, computed, shard, kv_heads)
    model.name_or_path = checkpoint.path
    model.generation_config.eos_token_id = ends  # TargetModel reads it
    help_layers(model, architecture)

    model = model.to(torch.device(device))
    target = TargetModel(model, aux_hidden_state_layers, shard, architecture, weight_dtype=dtype)
    if target.shared_vocabulary is not None:
        target.shared_vocabulary.warm_up(target.device)
    # On the device, and of a rank's own part: layers that are packed can neither move nor be cut.
    adapt_model(target.model, target.dtype, longest, to_bytes)
    logits = check_attention(target)
    check_rows(target)  # only now: without our attention, rows would differ for another reason than the error names
    _fuse(target, logits)  # last, because it must leave the logits of transformers' own layers as they are
    return target


def target_of(model: Any) -> TargetModel:
    """Return a target over the weights of a causal LM that transformers has loaded; `model` stays as it is. Raises
    CheckpointError.

    Modules are copied, parameters shared. Layers run unfused, because fused ones have weights of their own.
    """
    register_attention()
    shared = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in shared.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    use_pools(shared).set_attn_implementation(ATTENTION_NAME)
    architecture = inspect_architecture(read_model_config(model.name_or_path))
    help_layers(shared, architecture)
    target = TargetModel(shared, architecture=architecture)
    pin_rotary(shared, target.max_model_len)
    use_float32_head(shared)
    drop_padding(target.config)
    check_attention(target)
    return target


def _report_limit(config: Any, max_model_len: int, source: str) -> None:
    """Log a context that is shorter than the model's, because indexers would choose keys beyond it."""
    own = config.get_text_config().max_position_embeddings
    if max_model_len == num_chosen_keys(config) < own:
        log.warning("%s: contexts end at %d tokens instead of %d, as index_topk in its config.json says. With more, its "
                    "indexers would choose which of them a token attends to", source, max_model_len, own)  # fmt: skip


def help_layers(model: Any, architecture: Architecture) -> None:
    """Give attention what the layers of an architecture do not pass on to it. model: the part of it that is called."""
    if architecture.needs_relay:
        relay_arguments(model, PASS_ARGUMENTS)
    set_windows(model, architecture.windows)


def _fuse(target: TargetModel, expected: Tensor) -> None:
    """Fuse the layers if that leaves the logits of the check pass as they are, but for rounding.

    A new version of transformers may change a layer whose code we know. On CUDA, too, the check pass takes the plain
    operations between the products; `eyas.models.backends.cuda.check_kernels` compares the kernels with them. Each rank sees
    the logits of its own part of the vocabulary, and all fuse or none does.
    """
    is_fused = fuse_layers(target.model)
    if target.on_any_rank(not is_fused):
        if is_fused:
            unfuse_layers(target.model)
        return
    tolerance = tolerance_of(target)
    try:
        error = float((check_attention(target) - expected).abs().max())
    except CheckpointError:
        error = math.nan
    if target.on_any_rank(not error <= tolerance * float(expected.abs().max())):
        log.warning("%s: its layers run unfused, because fused ones compute something else", type(target.model).__name__)
        unfuse_layers(target.model)


def adapt_model(model: Any, dtype: torch.dtype, max_model_len: int, to_bytes: bool = False) -> None:
    """Change what transformers' model does, where packed rows over token slots or exact logits need it.

    to_bytes: see `optimize_for_cpu`.
    """
    drop_padding(model.config)
    pin_rotary(model, max_model_len)
    optimize_for_cpu(model, dtype, to_bytes)
    use_float32_head(model)


def read_model_config(source: CheckpointSource) -> Any:
    """Return transformers' config of a checkpoint, or of its text part, see `text_part`. A padding token beyond the
    vocabulary is left out. Raises CheckpointError.
    """
    from transformers import AutoConfig

    checkpoint = open_checkpoint(source)
    raw, file = checkpoint.config, checkpoint.config_file
    if raw.get("model_type") is None:
        raise CheckpointError(f"{file}: model_type is left out; it names the architecture, such as llama")
    try:
        with explained(f"transformers cannot read the config of {str(checkpoint.folder)!r}"):
            is_known = raw["model_type"] not in OTHER_NAMES
            config = AutoConfig.from_pretrained(checkpoint.folder) if is_known else _make_config(raw)
    except CheckpointError as error:
        raise with_setting(error, file, raw, _make_config) from error.__cause__
    config = text_part(config)
    if is_nested(config, raw) and _has_weights(checkpoint):
        config.tie_word_embeddings = not any(name.endswith(LM_HEAD) for name in checkpoint.files)
    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    if padding is not None and not 0 <= padding < text.vocab_size:
        log.warning("%s: pad_token_id is %s, which the vocabulary of %d does not have; it is not used", file, padding,
                    text.vocab_size)  # fmt: skip
        text.pad_token_id = None
    return config


def _has_weights(checkpoint: Checkpoint) -> bool:
    return any((checkpoint.folder / name).exists() for name in WEIGHT_FILES)


def _make_config(values: Mapping[str, Any]) -> Any:
    """Return transformers' config of these values."""
    from transformers import AutoConfig

    name = values["model_type"]
    return AutoConfig.for_model(**{**values, "model_type": OTHER_NAMES.get(name, name)})


def _inspect(config: Any, checkpoint: Checkpoint) -> Architecture:
    """Run `inspect_architecture` of the config in a folder. Its error names the setting that causes it, if one does."""
    try:
        return inspect_architecture(config)
    except CheckpointError as error:
        file = checkpoint.config_file
        if error.__cause__ is None:  # an architecture that Eyas does not serve, whatever its settings
            of = f"text part of {checkpoint.config['model_type']}: " if is_nested(config, checkpoint.config) else ""
            raise CheckpointError(f"{file}: {of}{error}") from None
        raise with_setting(
            error, file, checkpoint.config, lambda values: trace_attention(_make_config(values))
        ) from error.__cause__


def stored_names(config: Any, checkpoint: Checkpoint, own: Iterable[str] = ()) -> StoredNames | None:
    """Return where a multimodal checkpoint holds the tensors of its text part; None if config.json describes no other part.

    Raises CheckpointError if no embedding is found.

    Args:
        config: of the text part, as `read_model_config` returns it.
        own: the parameters of the text model; nothing asks `inspect_architecture`.
    """
    if not is_nested(config, checkpoint.config):
        return None
    names = find_stored_names(own or inspect_architecture(config).tensors, checkpoint.files)
    if names is None:
        raise CheckpointError(f"{checkpoint.path!r} holds no embedding of tokens of its text part, {config.model_type}")
    others = sum(not names.own(name) for name in checkpoint.files)
    log.info("%s: %s is served from the tensors %s*; %d others are of other parts and are not read", checkpoint.path,
             config.model_type, names.prefix, others)  # fmt: skip
    return names


def _check_shapes(
    expected: Mapping[str, tuple[int, ...]], config: Any, checkpoint: Checkpoint, names: StoredNames | None
) -> None:
    """Raises CheckpointError for the first stored tensor whose shape or kind of numbers is not what the config implies.

    Looks at tensors that have the architecture's own names; transformers renames others. Quantised ones have other shapes.
    """
    if quantisation(config):
        return
    stored = stored_shapes(checkpoint)
    if names is not None:
        expected = {name: expected[own] for name in stored if (own := names.own(name)) in expected}
        stored = {name: stored[name] for name in expected}
    for name, (shape, is_float) in sorted(stored.items(), key=lambda item: item[0] not in EMBEDDING_NAMES):
        wanted = expected.get(name)
        if wanted is not None and shape != wanted:
            text = config.get_text_config()
            sizes = [f"{key} {value}" for key in SIZES if (value := getattr(text, key, None)) in set(wanted) - set(shape)]
            implied = f" ({', '.join(sizes)})" if sizes else ""
            raise CheckpointError(
                f"{checkpoint.config_file}: {name} has shape {list(shape)}, but the config implies {list(wanted)}{implied}"
            )
        if not is_float and not TABLE.search(name) and (wanted is not None or TEXT_LAYER.fullmatch(name)):
            raise CheckpointError(f"{checkpoint}: {name} does not hold plain floating-point numbers, and the config names "
                                  "no quantization_config")  # fmt: skip


def _load_parts(
    config: Any, files: WeightFiles, passes: torch.dtype, to_bytes: bool, shard: Shard | None, kv_heads: Sequence[int]
) -> Any | None:
    """Return transformers' model whose weights are read from the files one by one: a rank's part of them, or all for the
    CPU, where they are packed. None for a whole model on another device, and where the files cannot be read in parts.

    passes: the dtype that the model computes in.
    """
    if shard is None and files.device != "cpu":
        return None

    def make_model() -> Any:
        model = auto_class(config).from_config(config, dtype=passes, attn_implementation=ATTENTION_NAME)
        return use_pools(model)

    if shard is None:
        model = _load_packed(make_model, files, passes, to_bytes)
    elif (model := load_shard(make_model, files, torch.device(files.device), shard, kv_heads)) is None:
        log.warning("%s: each rank reads all weights into memory before it takes its part", files.folder)
    else:
        log.info("rank %d of %d has read %.2f GiB of weights", shard.rank, shard.size, files.bytes_read / 2**30)
    return model


def _placed(model: Any, files: WeightFiles, passes: torch.dtype, shard: Shard | None, kv_heads: Sequence[int]) -> Any:
    """Return a whole model of transformers with what the device or the rank needs, see `_load_parts`."""
    if passes != files.dtype:
        optimize_for_cpu(model, passes)
        copy_stored_weights(model, passes)  # after packing, which reads the weights in the dtype of the files
    # The device first: a GPU alone may multiply by quantised weights, whose projections of latents become plain. But a rank
    # cuts its part on the CPU, so that no device has to hold the whole model.
    model = use_pools(model if shard else model.to(torch.device(files.device)))
    if shard is not None:
        shard_model(model, shard, kv_heads)  # after the pools: their projections of latents are what is cut
    return model


def _load_packed(make_model: Callable[[], Any], files: WeightFiles, passes: torch.dtype, to_bytes: bool) -> Any | None:
    """Return a causal LM on the CPU that is packed straight from the files; None as `weightless_model`."""
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
    _warn_of_unused(files.names - set(names.values()) - {LM_HEAD}, files.folder, model.config)
    optimize_for_cpu(model, passes, to_bytes)
    copy_stored_weights(model, passes)
    return model


def _load_weights(config: Any, checkpoint: Checkpoint, dtype: torch.dtype, names: StoredNames | None) -> Any:
    """Return transformers' model with all of its weights. names: see `stored_names`."""
    from transformers import GenerationConfig

    no_defaults: Any = GenerationConfig
    kind = quantisation(config)  # transformers takes it away where it dequantises
    what = f"transformers cannot load a causal LM from {checkpoint.path!r}"
    with explained(what), quiet_transformers(), without_indexers(config):
        model, report = auto_class(config).from_pretrained(
            checkpoint.folder, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME,
            generation_config=no_defaults(), ignore_mismatched_sizes=True, output_loading_info=True,
            key_mapping=names.key_mapping if names else None,
        )  # fmt: skip
    if kind and not quantisation(model.config):
        log.warning("%s: nothing here multiplies by weights quantised by %s; they are held as %s, which takes more memory",
                    checkpoint.path, kind, str(dtype).removeprefix("torch."))  # fmt: skip
    if mismatched := sorted(report["mismatched_keys"]):
        name, shape, wanted = mismatched[0]
        raise CheckpointError(f"{checkpoint.path!r}: {name} has shape {list(shape)}, but its config implies {list(wanted)}")
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{checkpoint.path!r} lacks tensors that its config asks for: {shortened(missing)}")
    if names is None:  # else the other parts would be among them
        _warn_of_unused(report["unexpected_keys"], checkpoint.path, config)
    return model


def _warn_of_unused(names: Iterable[str], source: object, config: Any) -> None:
    """Log the tensors of these names, except tables, indexers and modules for multi-token prediction."""
    left = [name for name in not_of_indexers(names) if not TABLE.search(name)]
    modules = find_modules(left, int(config.get_text_config().num_hidden_layers))
    if unused := sorted(name for name in left if not (modules and modules.owns(name))):
        log.warning("%s: its config asks for no tensor of the names %s; they are not used", source, shortened(unused))


def check_tensor_parallel(target: CheckpointSource, num_ranks: int) -> None:
    """Raises CheckpointError unless the ranks can split the heads of a target evenly."""
    check_ranks(num_ranks, open_checkpoint(target).text_config)
