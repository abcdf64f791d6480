"""Hidden states of the target for training: computed beside the trainer, or read from shards that were stored before.

Legend: N windows, L tokens, C target hidden, m layers that the head reads, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import EMBEDDING_NAMES, LM_HEAD_NAMES, Checkpoint, WeightFiles, check_layers, explained, resolve
from eyas.models.heads.eagle_config import read_sizes
from eyas.models.hidden_states import FINAL_NORM_OUTPUT, StateHooks
from eyas.models.layers.attention import import_transformers
from eyas.models.loading import read_model_config, stored_names, target_of
from eyas.models.parallel.shards import weightless_model
from eyas.models.target import TargetModel
from eyas.models.text_part import auto_class
from eyas.train.config import HeadConfig
from eyas.train.windows import Batch, Windows

INDEX_FILE, LAYERS_KEY = "features.json", "aux_hidden_state_layers"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetStates:
    """States of the target for a batch.

    Attributes:
        aux [N, L, m * C]: states that the head reads.
        final [N, L, C]: states that the target's lm_head reads.
    """

    aux: Tensor
    final: Tensor


class StateSource(Protocol):
    """Source of states."""

    def states(self, batch: Batch) -> TargetStates:
        """Return the states of a batch, on its device."""
        ...


class NoStates:
    """StateSource for losses without the target."""

    def states(self, batch: Batch) -> TargetStates:
        nothing = torch.empty(*batch.tokens.shape, 0, device=batch.tokens.device)
        return TargetStates(nothing, nothing)


@dataclass(frozen=True)
class TargetWeights:
    """Weights that heads share with the target: embedding and lm_head float32 [V, C], and its config."""

    folder: Path
    config: dict[str, Any]
    embedding: Tensor
    lm_head: Tensor

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])


def load_target_weights(model: str) -> TargetWeights:
    """Raises CheckpointError."""
    target = Checkpoint(model)
    config = target.text_config
    if missing := {"hidden_size", "num_hidden_layers"} - set(config):
        family = config.get("model_type")
        raise CheckpointError(f"{model}: config.json of {family!r} has no {min(missing)}; no head can be trained for it")
    if config.get("final_logit_softcapping"):
        log.warning("%s bounds its logits (final_logit_softcapping); losses compare with logits that are not bounded", model)
    embedding, lm_head = (target.tensor(names).float() for names in (EMBEDDING_NAMES, LM_HEAD_NAMES))
    return TargetWeights(target.folder, dict(config), embedding, lm_head)


def head_sizes(head: HeadConfig, target: TargetWeights, num_layers: int, draft_vocab_size: int) -> dict[str, Any]:
    """Return the sizes of a new head, as fields of its config: those that its settings name, the target's for the others.

    num_layers: if the settings name no number. Raises CheckpointError.
    """
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    named = {key: value for key in sizes if (value := getattr(head, key))}
    stated = target.config | named | {"draft_vocab_size": draft_vocab_size}
    return read_sizes(stated, head.num_hidden_layers or num_layers, target.folder / "config.json")


class OnlineTarget:
    """The target in this process, frozen. Documents of a window do not see each other.

    Raises CheckpointError, and ConfigError if it is to be sharded and there is one process only.

    Args:
        layers: as aux hidden state layers, whose inputs are collected.
        is_sharded: spread the weights over the processes.
    """

    def __init__(
        self, model: str, layers: Sequence[int], device: torch.device, dtype: torch.dtype, is_sharded: bool = False
    ) -> None:
        import_transformers()
        sharded = _load_sharded(resolve(model), device, dtype) if is_sharded else None
        # Bytes of the target's weights that this process has read; None if it has read all of them.
        self.bytes_read = sharded[1] if sharded else None
        self.model: Any = sharded[0] if sharded else load_whole(model, dtype)
        self._is_sharded = is_sharded
        decoder: Any = self.model.get_decoder()
        num_layers = len(decoder.layers)
        for layer in set(layers) - {FINAL_NORM_OUTPUT}:
            if not 0 <= layer <= num_layers:
                raise CheckpointError(f"head.target_layer_ids holds {layer - 1}, but {model} has {num_layers} layers")
        self._hooks = StateHooks(self.model)
        self._hooks.use(tuple(layers))
        if is_sharded and sharded is None:
            _shard_decoder(decoder, device)
        self._decoder: nn.Module = decoder.to(device)
        self._device = torch.empty(0, device=device).device

    def can_serve(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether an engine on this device can run these weights as they are.

        On the CPU it packs weights of its own.
        """
        place = torch.empty(0, device=device).device
        own = self._device == place and self.model.dtype == dtype
        return own and place.type != "cpu" and not self._is_sharded

    def serving_target(self) -> TargetModel:
        """Return the engine's target over the same weights; its modules, hooks and attention are its own."""
        return target_of(self.model.to(self._device))

    def share_weights(self, head: nn.Module) -> None:
        """Let tensors of a head that are not trained and equal the target's embedding be that one, which is large."""
        own = self.model.get_input_embeddings().weight
        for tensor in (*head.parameters(), *head.buffers()):
            alike = (tensor.shape, tensor.dtype, tensor.device) == (own.shape, own.dtype, own.device)
            if alike and not tensor.requires_grad and not self._is_sharded and torch.equal(tensor, own):
                tensor.data = own.data

    @torch.no_grad()
    def states(self, batch: Batch) -> TargetStates:
        device, batch = batch.tokens.device, batch.to(self._device)
        # transformers keeps documents apart where positions begin again. A mask would replace the windows of its layers.
        found = self._decoder(batch.tokens, attention_mask=None, position_ids=batch.positions, use_cache=False)
        final = found.last_hidden_state
        kept = self._hooks.states
        self._hooks.states = {}
        aux = torch.cat([kept[layer] for layer in self._hooks.layers], -1) if kept else final
        return TargetStates(aux.to(device), final.to(device))


def load_whole(model: str, dtype: torch.dtype) -> Any:
    """Return transformers' frozen model with all of its weights, in the host's memory. Raises CheckpointError."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    target = Checkpoint(model)
    config = read_model_config(target)
    check_layers(target.files, config, target.config_file)
    with explained(f"transformers cannot load a causal LM from {model!r}"):
        names = stored_names(config, target)
        mapping = names.key_mapping if names else None
        loaded: Any = auto_class(config).from_pretrained(target.folder, config=config, dtype=dtype, key_mapping=mapping)
    return loaded.eval().requires_grad_(False)


def _load_sharded(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, int] | None:
    """Return transformers' frozen model whose decoder holds this process's part of the weights, and the bytes that were
    read.

    Each part is read from its file straight to the device; lm_head gets no memory. None if parts cannot be read. Raises as
    `_shard_decoder`.
    """
    from torch.distributed.tensor import DTensor

    target = Checkpoint(folder)
    config = read_model_config(target)
    make_model = partial(auto_class(config).from_config, config, dtype=dtype)
    names = stored_names(config, target)
    files = WeightFiles(target, dtype, str(torch.empty(0, device=device).device), names.own if names else None)
    found = weightless_model(make_model, files)
    if found is None:
        log.warning("%s: each process reads all weights into memory before it takes its part", folder)
        return None
    model, parameters = found
    decoder = model.eval().get_decoder()
    prefix = next(path for path, module in model.named_modules() if module is decoder)
    _shard_decoder(decoder, device)
    parts = {}
    for name, whole in decoder.named_parameters():
        local, mesh = whole.to_local(), whole.device_mesh
        start = min(mesh.get_local_rank() * -(-len(whole) // mesh.size()), len(whole))
        rows = torch.empty_like(local, device=files.device)
        if len(local):
            rows = files[parameters[f"{prefix}.{name}"]].narrow(0, start, len(local))
        shape, stride = whole.shape, whole.stride()
        parts[name] = DTensor.from_local(rows, mesh, whole.placements, run_check=False, shape=shape, stride=stride)
    decoder.load_state_dict(parts, strict=False, assign=True)
    return model, files.bytes_read


def _shard_decoder(decoder: Any, device: torch.device) -> None:
    """Spread the weights over all processes (FSDP2), by rows. Whole ones go to the device layer by layer.

    Raises ConfigError if there is one process only.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ConfigError("shard_target spreads the target over several processes, but there is one; start it with torchrun")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh)


def additive_document_mask(documents: Tensor) -> Tensor:
    """Return 0 where a position sees another, an earlier one of its document or itself, else minus infinity, [N, 1, L, L]:
    in autocast's dtype where that is on, else float32.

    A head's layers and steps share it, also in what they keep for the backward pass; each would convert a bool mask.
    """
    place = documents.device.type
    dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else torch.float32
    mask = torch.zeros((), dtype=dtype, device=documents.device)
    seen = (documents[:, :, None] == documents[:, None]).tril()
    return torch.where(seen[:, None], mask, -torch.inf)


@dataclass(frozen=True)
class StoredFeatures:
    """States that `store_features` wrote; batches are found by the numbers of their windows.

    Attributes:
        dtype: of what it yields.
        stored: layers that the shards hold, whose states stand side by side.
        layers: layers that a head reads.
    """

    folder: Path
    shard_windows: int
    dtype: torch.dtype
    stored: tuple[int, ...]
    layers: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path, windows: Windows, layers: Sequence[int], dtype: torch.dtype) -> StoredFeatures:
        """Raises ConfigError for features of other windows, or without some of the layers, and for those of a command that
        did not end.
        """
        index = _read_index(folder, windows)
        if index is None or not index.get("is_complete"):
            raise ConfigError(f"{str(folder)!r} does not hold all features; run `eyas train features` first, it continues")
        stored = tuple(index[LAYERS_KEY])
        if missing := sorted({*layers} - {*stored, FINAL_NORM_OUTPUT}):
            raise ConfigError(
                f"the features in {folder} are the inputs of the layers {list(stored)}, but the head also reads {missing}; "
                "store them in another folder, or name layers that are there as head.target_layer_ids, each less 1"
            )
        return cls(folder, index["shard_windows"], dtype, stored, tuple(layers))

    def states(self, batch: Batch) -> TargetStates:
        from safetensors import safe_open

        rows = []
        for number in batch.index:
            file, place = self.folder / _shard(number // self.shard_windows), number % self.shard_windows
            problem = f"cannot read features {file}; remove it, and run `eyas train features` again"
            with explained(problem), safe_open(file, framework="pt") as shard:
                rows.append([shard.get_slice(name)[place : place + 1] for name in ("aux", "final")])
        aux, final = (torch.cat(parts).to(batch.tokens.device, self.dtype) for parts in zip(*rows, strict=True))
        if self.layers == self.stored:
            return TargetStates(aux, final)
        columns = dict(zip(self.stored, aux.chunk(max(1, len(self.stored)), -1), strict=False)) | {FINAL_NORM_OUTPUT: final}
        return TargetStates(torch.cat([columns[layer] for layer in self.layers], -1), final)


def features_bytes(windows: Windows, num_layers: int, hidden: int) -> int:
    """Return the disk that stored features take, in bytes of bfloat16."""
    return len(windows) * windows.max_length * (num_layers + 1) * hidden * 2


def store_features(
    source: StateSource, windows: Windows, layers: Sequence[int], hidden: int, out: Path, progress: Any
) -> None:
    """Write shards of states in bfloat16. Shards that are there already are kept, so that a stopped command continues.

    Raises ConfigError before anything is written if the disk is too small or `out` holds features of another run, and if the
    disk fills up all the same.
    """
    index = _read_index(out, windows, layers) or _features_index(windows, layers) | {
        "shard_windows": max(1, 2**28 // (windows.max_length * (len(layers) + 1) * hidden * 2))
    }
    size = index["shard_windows"]
    shards = range(0, len(windows), size)
    missing = [start for start in shards if not (out / _shard(start // size)).exists()]
    with keeping_saved(out):
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    if (needed := features_bytes(windows, len(layers), hidden) * len(missing) // max(1, len(shards))) > free:
        raise ConfigError(f"the features take {needed / 2**30:.1f} GiB, but {out} has {free / 2**30:.1f} GiB free")
    with keeping_saved(out):
        _write_index(out, index | {"is_complete": False})
        for start in progress(missing):
            parts = [source.states(windows.batch([n])) for n in range(start, min(start + size, len(windows)))]
            _save_shard(out / _shard(start // size), parts)
        _write_index(out, index | {"is_complete": True})


def _save_shard(file: Path, parts: Sequence[TargetStates]) -> None:
    from safetensors.torch import save_file

    tensors = {name: torch.cat([getattr(part, name).bfloat16().cpu() for part in parts]) for name in ("aux", "final")}
    part = file.with_suffix(".part")
    try:
        save_file(tensors, part)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def keeping_saved(out: Path) -> Iterator[None]:
    """Turn the error of a full disk into a ConfigError. safetensors has an error of its own for it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot write to {out}: {error}; nothing that was saved is lost: free space and run the same command again"
        ) from error


def _features_index(windows: Windows, layers: Sequence[int] | None) -> dict[str, Any]:
    found = {"model": windows.info.model, "max_length": windows.max_length, "windows": windows.digest}
    return found if layers is None else found | {LAYERS_KEY: list(layers)}


def _read_index(folder: Path, windows: Windows, layers: Sequence[int] | None = None) -> dict[str, Any] | None:
    """Return the index of a folder, if it has one. Raises ConfigError for features of other windows, or of other layers if
    any are named.
    """
    if not (folder / INDEX_FILE).exists():
        return None
    try:
        index: dict[str, Any] = json.loads((folder / INDEX_FILE).read_text())
        if type(index["shard_windows"]) is not int or index["shard_windows"] < 1:
            raise ValueError(f"shard_windows is {index['shard_windows']!r}")
        if not all(type(layer) is int for layer in index[LAYERS_KEY]):
            raise ValueError(f"{LAYERS_KEY} is {index[LAYERS_KEY]!r}")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"cannot read {folder / INDEX_FILE}: {error}; remove the folder and store them again") from error
    expected = _features_index(windows, layers)
    wrong = [f"{key} {index.get(key)!r}, not {value!r}" for key, value in expected.items() if index.get(key) != value]
    if wrong:
        raise ConfigError(f"the features in {folder} were made for {'; '.join(wrong)}; name another folder for this run's")
    return index


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def _shard(number: int) -> str:
    return f"features-{number:05d}.safetensors"
