"""Reads checkpoints strictly: folders and hub ids, config.json, tensors, fingerprints, vocabularies.

Knows no module and no kind of head. Everything here raises CheckpointError for what it cannot read or accept.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eyas.cache.kv_cache import KVScales
from eyas.config import Dtype
from eyas.errors import CheckpointError, ConfigError
from eyas.tokenizer import check_source

# Key of config.json under which `eyas check head --write` records a head's wiring. Fingerprints leave it out.
WIRING_KEY = "eyas"
# Key under which P-EAGLE heads of ours state the depths that they were trained for.
DEPTH_KEY = "eyas_num_depths"
# Most tensors that an error message names.
MAX_NAMED = 12
DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")
WEIGHT_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors", "pytorch_model.bin")
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
# The embedding may be tied to the lm_head.
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", *EMBEDDING_NAMES)
# The scheme of torchao whose weights have the layouts of GPU kernels; no kernel of a CPU reads them.
PACKED_FOR_GPUS = "Int4WeightOnlyConfig"
# Quantised weights that are served, as transformers names them, and the packages that read them.
QUANTISATIONS: Mapping[str, tuple[str, ...]] = {
    "torchao": ("torchao",),
    "fp8": ("accelerate",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
}
# Scales of the KV cache, as checkpoints for vLLM name them: of the attention, or of the projection.
KV_SCALE = re.compile(r"layers\.(?P<layer>\d+)\.self_attn\.(?:attn\.)?(?:(?P<of>[kv])_proj\.)?(?P<kind>[kv])_scale$")
Setting = TypeVar("Setting", int, float, bool)
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}
FUSER_PREFIXES = tuple(
    f"{model}{part}." for model in ("", "model.") for part in ("fc", "fc_norm", "input_norm", "hidden_norm")
)


def resolve(path_or_id: str) -> Path:
    """The local folder of a checkpoint; a hub id is fetched into the hub's cache. Raises CheckpointError."""
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    check_source(path_or_id)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_id, allow_patterns=["*.json", "*.safetensors", "*.bin", "*_lm_head.pt"]))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot fetch {path_or_id!r} from the hub, and no such folder exists: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises CheckpointError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} does not hold a JSON object")
    return config


def read_target_config(folder: Path) -> dict[str, Any]:
    """config.json of a target's language model, which multimodal checkpoints nest. Raises CheckpointError."""
    config = read_config(folder)
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def quantisation(config: Any) -> str:
    """What the weights of a checkpoint are quantised by, as transformers names it: torchao, fp8, awq, ...; empty if plain.

    config: config.json, or transformers' config.
    """
    found = (
        config.get("quantization_config") if isinstance(config, Mapping) else getattr(config, "quantization_config", None)
    )
    if not found:
        return ""
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "an unnamed method")


def read_plain_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft head. Raises CheckpointError, also for quantised weights: heads are served with plain ones."""
    config = read_config(folder)
    if kind := quantisation(config):
        raise CheckpointError(
            f"{folder} holds a draft head quantised by {kind}, which Eyas does not serve; take the head with plain weights"
        )
    return config


def check_quantisation(config: Mapping[str, Any], source: object, device: str) -> None:
    """Raises CheckpointError for weights that Eyas does not serve on a device, and for a package that they need and is
    missing."""
    kind = quantisation(config)
    if not kind:
        return
    if kind not in QUANTISATIONS:
        raise CheckpointError(
            f"{source} holds weights quantised by {kind}, which Eyas does not serve; it serves {', '.join(QUANTISATIONS)}. "
            "Take another checkpoint of the model"
        )
    missing = [package for package in QUANTISATIONS[kind] if find_spec(package.replace("-", "_")) is None]
    if missing:
        raise CheckpointError(
            f"{source} holds weights quantised by {kind}; install what reads them: pip install {' '.join(missing)}"
        )
    if device == "cpu" and PACKED_FOR_GPUS in json.dumps(config["quantization_config"], default=str):
        raise CheckpointError(
            f"{source} holds 4-bit integers that torchao's {PACKED_FOR_GPUS} packs for GPUs, and device is cpu; serve it on "
            "a GPU, or take weights of torchao's IntxWeightOnlyConfig"
        )


def read_tensors(folder: Path, own_names: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """All tensors of a checkpoint, from safetensors or pytorch_model.bin, sharded or not.

    own_names: files to look for first. Raises CheckpointError.
    """
    own = [folder / name for name in own_names if (folder / name).exists()]
    files = own[:1] or sorted(set(weight_map(folder).values()))
    return {name: tensor for file in files for name, tensor in _read_file(file)}


def read_tensor(folder: Path, names: tuple[str, ...]) -> Tensor:
    """The first of `names` that the checkpoint holds; of safetensors nothing else is read. Raises CheckpointError."""
    files = weight_map(folder)
    for name in names:
        if name in files:
            return dict(_read_file(files[name], name))[name]
    raise CheckpointError(f"{folder} holds none of the tensors {', '.join(names)}")


def read_kv_scales(folder: Path, num_layers: int) -> list[KVScales]:
    """Scales of keys and values with 8 bits that a checkpoint names, of all layers; nothing if it has none.

    Raises CheckpointError if it has some of them only, or one that is no positive number.
    """
    names = weight_map(folder)
    found: dict[tuple[int, str], float] = {}
    for name in names:
        match = KV_SCALE.search(name)
        if match is not None:
            found[int(match["layer"]), match["kind"]] = float(read_tensor(folder, (name,)).float().max())
    if not found:
        return []
    wanted = {(layer, kind) for layer in range(num_layers) for kind in "kv"}
    wrong = sorted(wanted ^ set(found)) or [place for place, scale in sorted(found.items()) if not 0 < scale < math.inf]
    if wrong:
        layer, kind = wrong[0]
        raise CheckpointError(
            f"{folder} has scales of the KV cache, but the {kind}_scale of layer {layer} is missing or no positive number; "
            "leave all scales out, or write one of each kind for every layer"
        )
    return [KVScales(found[layer, "k"], found[layer, "v"]) for layer in range(num_layers)]


def weight_map(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint, sharded or not. Raises CheckpointError."""
    for file in (folder / name for name in WEIGHT_FILES):
        if file.suffix == ".json" and file.exists():
            return {name: folder / shard for name, shard in json.loads(file.read_text())["weight_map"].items()}
        if file.exists():
            with _open_weights(file, "meta") as (names, _):
                return dict.fromkeys(names, file)
    raise CheckpointError(f"{folder} holds no weights; expected one of {', '.join(WEIGHT_FILES)}")


class StoredTensor:
    """A tensor in a file of safetensors. Only the parts that are asked for are read."""

    def __init__(self, files: WeightFiles, stored: Any) -> None:
        self._files, self._stored = files, stored
        self.shape: tuple[int, ...] = tuple(stored.get_shape())
        self.ndim, self.dtype, self.device = len(self.shape), files.dtype, files.device

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Read a part of one dimension, as `Tensor.narrow`."""
        part: Tensor = self._stored[(*[slice(None)] * dim, slice(start, start + length))]
        self._files.bytes_read += part.nbytes
        return part.to(self._files.dtype)


class WeightFiles:
    """The tensors of a checkpoint in safetensors. They are read straight to a device, then take the dtype.

    bytes_read: of all parts so far.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        """Reads no tensor. Raises CheckpointError for a folder without weights."""
        self.dtype, self.bytes_read = dtype, 0
        self.device, self._map = device, weight_map(folder)
        self._open: dict[Path, Any] = {}

    @property
    def can_read_parts(self) -> bool:
        """Whether all files are safetensors: others can only be read as a whole."""
        return all(file.suffix == ".safetensors" for file in self._map.values())

    def __contains__(self, name: str) -> bool:
        return name in self._map

    def __getitem__(self, name: str) -> StoredTensor:
        """Raises CheckpointError for a file that cannot be read."""
        file = self._map[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt", device=self.device)
            return StoredTensor(self, self._open[file].get_slice(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read weights {file}: {error}") from error


def _read_file(file: Path, prefixes: str | tuple[str, ...] = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors whose names begin with one of the prefixes, sorted by name; of safetensors no others are read."""
    with _open_weights(file) as (names, get):
        yield from ((name, get(name)) for name in names if name.startswith(prefixes))


@contextmanager
def _open_weights(file: Path, device: str = "cpu") -> Iterator[tuple[list[str], Callable[[str], Tensor]]]:
    """Sorted names of a file's tensors, and what reads one of them. Raises CheckpointError, also inside the block."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                yield sorted(handle.keys()), handle.get_tensor
        else:
            tensors: dict[str, Tensor] = torch.load(file, map_location=device, weights_only=True)
            yield sorted(tensors), tensors.__getitem__
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"cannot read weights {file}: {error}") from error


@torch.no_grad()
def merge_quantised(parts: Sequence[nn.Module]) -> nn.Linear | None:
    """Sibling linear layers as one, if torchao quantised their weights by rows; None for others.

    Numbers and scales of all are put one below the other, so nothing is rounded again. The layers' weights become views.
    """
    if any(type(part) is not nn.Linear for part in parts):
        return None
    layers = cast(Sequence[nn.Linear], parts)
    weights: list[Any] = [layer.weight.data for layer in layers]
    if len({(type(weight), layer.bias is None) for weight, layer in zip(weights, layers, strict=True)}) > 1:
        return None
    kind, counts = type(weights[0]), [len(weight) for weight in weights]
    if not hasattr(kind, "__tensor_flatten__"):
        return None
    names, settings = weights[0].__tensor_flatten__()
    inner = [{name: getattr(weight, name) for name in names} for weight in weights]
    has_rows = all(len(tensor) == count for own, count in zip(inner, counts, strict=True) for tensor in own.values())
    if not has_rows or any(weight.__tensor_flatten__() != (names, settings) for weight in weights):
        return None
    whole, width = {name: torch.cat([own[name] for own in inner]) for name in names}, weights[0].shape[1]

    def rows(start: int, count: int) -> Tensor:
        tensors = {name: tensor[start : start + count] for name, tensor in whole.items()}
        built: Tensor = kind.__tensor_unflatten__(tensors, settings, torch.Size((count, width)), (width, 1))
        return built

    for layer, count, end in zip(layers, counts, accumulate(counts), strict=True):
        layer.weight = nn.Parameter(rows(end - count, count), requires_grad=False)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    merged = nn.Linear(width, sum(counts), bias=False, device="meta")
    merged.weight = nn.Parameter(rows(0, sum(counts)), requires_grad=False)
    merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None  # type: ignore[assignment]
    return merged


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], optional: Collection[str], source: Path
) -> None:
    """Raises CheckpointError unless `tensors` are exactly `expected`, shapes included; `optional` ones may be absent."""
    missing = sorted(set(expected) - set(tensors) - set(optional))
    unexpected = [_with_nearest(name, expected) for name in sorted(set(tensors) - set(expected))]
    wrong = [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [f"{what} {_shortened(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if problems := problems + wrong[:MAX_NAMED]:
        raise CheckpointError(f"{source} does not fit its config: {'; '.join(problems)}")


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + f" and {len(names) - MAX_NAMED} more" * (len(names) > MAX_NAMED)


def _with_nearest(name: str, expected: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(expected), n=1)
    return f"{name} (nearest is {near[0]})" if near else name


def target_fingerprint(path_or_id: str) -> str:
    """Digest of a target's config and weights; equal on every machine that holds the same checkpoint."""
    return _digest(resolve(path_or_id), ("",))


def head_fingerprint(path_or_id: str) -> str:
    """Digest of what decides a head's fused features: its config, its fc and the norms around it."""
    return _digest(resolve(path_or_id), FUSER_PREFIXES)


def _digest(folder: Path, prefixes: tuple[str, ...]) -> str:
    """Hash config.json and, of each tensor, name, shape, dtype and about 16,000 elements spread over it."""
    config = {key: value for key, value in read_config(folder).items() if key != WIRING_KEY}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted(set(weight_map(folder).values())):
        for name, tensor in _read_file(file, prefixes):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            sample = tensor.flatten()[:: max(1, tensor.numel() // 16384)].contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def check_vocabulary(draft_model: str, target: str) -> None:
    """Raises CheckpointError unless both vocabularies have the same size and every token has the same id in both.

    Ids are compared where both folders hold a tokenizer.json. Reads no weights.
    """
    folders = resolve(draft_model), resolve(target)
    draft_size, target_size = (read_target_config(folder).get("vocab_size") for folder in folders)
    if draft_size != target_size:
        raise CheckpointError(
            f"the draft model {draft_model} has a vocabulary of {draft_size}, the target {target} one of {target_size}; "
            "take a draft model that was made with the target's vocabulary"
        )
    draft_ids, target_ids = (_token_ids(folder) for folder in folders)
    tokens = draft_ids.keys() | target_ids.keys()
    differing = sorted(token for token in tokens if draft_ids.get(token) != target_ids.get(token))
    if draft_ids and target_ids and differing:
        token = differing[0]
        raise CheckpointError(
            f"the draft model {draft_model} has another tokenizer than the target {target}: {len(differing)} tokens differ, "
            f"such as {token!r}, which is {draft_ids.get(token, 'missing')} in the one and "
            f"{target_ids.get(token, 'missing')} in the other"
        )


def _token_ids(folder: Path) -> dict[str, int]:
    """The vocabulary of the folder's tokenizer.json, added tokens included; empty if there is no such file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"cannot read {file}: {error}") from error


def get_setting(
    kind: type[Setting], config: Mapping[str, Any], key: str, source: object, default: Setting | None = None
) -> Setting:
    """An int, float or bool of a config.json. Raises CheckpointError for another type, and if it is left out, unless there
    is a default."""
    value = config.get(key) or default
    if not isinstance(value, int | float if kind is float else kind):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be {_TYPE_NAMES[kind]}")
    return kind(value)


def context_length(config: Any, max_model_len: int, name: str) -> int:
    """Most tokens of prompt and output together: max_model_len, or the model's own limit for 0.

    config: transformers' of the model. Raises ConfigError above that limit.
    """
    limit = int(config.get_text_config().max_position_embeddings)
    if max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {name!r} is made for {limit} tokens (max_position_embeddings in its "
            "config.json); lower it, or leave it out"
        )
    return max_model_len or limit


def resolve_placement(device: str, dtype: str, target: str) -> tuple[str, Dtype]:
    """The device and dtype that `auto` stands for; others stay as they are. target: folder or hub id of the target model.

    Device: CUDA where torch finds a GPU, else the CPU. Dtype: the target checkpoint's on a GPU; float32 on the CPU, and
    where the config names none that Eyas serves. Raises CheckpointError for a config that cannot be read.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device.startswith("cuda"):
        config = read_target_config(resolve(target))
        stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        dtype = stored if stored in DTYPES else "float32"
    return device, cast(Dtype, "float32" if dtype == "auto" else dtype)


def check_device(dtype: str, device: str) -> None:
    """Raises ConfigError for a dtype or device that torch does not have here. `auto` must have been resolved."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
