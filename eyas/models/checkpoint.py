"""Reads checkpoints strictly: folders and hub ids, config.json, tensors, fingerprints, vocabularies.

Knows no module and no kind of head. Everything here raises CheckpointError for what it cannot read or accept.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.config import Dtype
from eyas.errors import CheckpointError, ConfigError

# Key of config.json under which `eyas check head --write` records a head's wiring. Fingerprints leave it out.
WIRING_KEY = "eyas"
# Most tensors that an error message names.
MAX_NAMED = 12
DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")
WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
FUSER_PREFIXES = ("fc.", "fc_norm.", "input_norm.", "model.fc.", "model.fc_norm.", "model.input_norm.")


def resolve(path_or_id: str) -> Path:
    """The local folder of a checkpoint; a hub id is fetched into the hub's cache. Raises CheckpointError."""
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    if Path(path_or_id).exists() or path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") > 1:
        raise CheckpointError(f"no checkpoint folder at {path_or_id!r}; give a folder that holds config.json, or a hub id")
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


def read_tensors(folder: Path, own_names: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """All tensors of a checkpoint, from safetensors or pytorch_model.bin, sharded or not.

    own_names: files to look for first. Raises CheckpointError.
    """
    own = [folder / name for name in own_names if (folder / name).exists()]
    files = own[:1] or _weight_files(folder)
    return {name: tensor for file in files for name, tensor in _read_file(file)}


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors of a checkpoint. Raises CheckpointError."""
    if weight_map := _weight_map(folder):
        return set(weight_map)
    file = _weight_file(folder)
    if file.suffix != ".safetensors":
        return {name for name, _ in _read_file(file)}
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read weights {file}: {error}") from error


def read_tensor(folder: Path, names: tuple[str, ...]) -> Tensor:
    """The first of `names` that the checkpoint holds; of safetensors nothing else is read. Raises CheckpointError."""
    weight_map = _weight_map(folder)
    files = [weight_map[name] for name in names if name in weight_map][:1] or [_weight_file(folder)]
    tensors = dict(_read_file(files[0], names))
    for name in names:
        if name in tensors:
            return tensors[name]
    raise CheckpointError(f"{folder} holds none of the tensors {', '.join(names)}")


def read_embedding(folder: Path) -> Tensor:
    """The input embedding of a target [V, C]. Raises CheckpointError."""
    return read_tensor(folder, EMBEDDING_NAMES)


def read_lm_head(folder: Path) -> Tensor:
    """The lm_head of a target [V, C], or its embedding if the two are tied. Raises CheckpointError."""
    return read_tensor(folder, (*LM_HEAD_NAMES, *EMBEDDING_NAMES))


def _read_file(file: Path, prefixes: tuple[str, ...] = ("",)) -> Iterator[tuple[str, Tensor]]:
    """Tensors whose names begin with one of the prefixes, sorted by name; of safetensors no others are read."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                for name in sorted(name for name in handle.keys() if name.startswith(prefixes)):  # noqa: SIM118
                    yield name, handle.get_tensor(name)
        else:
            tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
            yield from sorted((name, tensor) for name, tensor in tensors.items() if name.startswith(prefixes))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"cannot read weights {file}: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    return sorted(set(_weight_map(folder).values())) or [_weight_file(folder)]


def _weight_map(folder: Path) -> dict[str, Path]:
    """File of each tensor of a sharded checkpoint; empty for a checkpoint of one file."""
    for name in WEIGHT_FILES:
        if name.endswith(".index.json") and (folder / name).exists():
            index = json.loads((folder / name).read_text())
            return {tensor: folder / file for tensor, file in index["weight_map"].items()}
    return {}


def _weight_file(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if not name.endswith(".json") and (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder} holds no weights; expected one of {', '.join(WEIGHT_FILES)}")


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
    """Digest of what decides a head's fused features: its config, its fc and the norms before fc."""
    return _digest(resolve(path_or_id), FUSER_PREFIXES)


def _digest(folder: Path, prefixes: tuple[str, ...]) -> str:
    """Hash config.json and, of each tensor, name, shape, dtype and about 16,000 elements spread over it."""
    config = {key: value for key, value in read_config(folder).items() if key != WIRING_KEY}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in _weight_files(folder):
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


def get_int(config: Mapping[str, Any], key: str, source: object, default: int | None = None) -> int:
    """A setting of a config.json. Raises CheckpointError for anything but a whole number, unless there is a default."""
    value = config.get(key) or default
    if not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a whole number")
    return value


def get_float(config: Mapping[str, Any], key: str, source: object, default: float) -> float:
    """A setting of a config.json. Raises CheckpointError for anything but a number."""
    value = config.get(key) or default
    if not isinstance(value, int | float):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a number")
    return float(value)


def get_bool(config: Mapping[str, Any], key: str, source: object) -> bool:
    """A setting of a config.json, false if it is left out. Raises CheckpointError for anything but true or false."""
    value = config.get(key)
    value = False if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be true or false")
    return value


class _Placed(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...


PlacedT = TypeVar("PlacedT", bound=_Placed)


def resolve_placement(settings: PlacedT, target: str) -> PlacedT:
    """Replace `auto` in the `device` and `dtype` of a frozen dataclass. target: folder or hub id of the target model."""
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device, target)
    return cast(PlacedT, replace(cast(Any, settings), device=device, dtype=dtype))


def resolve_device(device: str) -> str:
    """The device that `auto` stands for: CUDA where torch finds a GPU, else the CPU. Other devices stay as they are."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(dtype: str, device: str, target: str) -> str:
    """The dtype that `auto` stands for: the target checkpoint's on a GPU, float32 on the CPU and where the config names
    none that Eyas serves. Other dtypes stay as they are. Raises CheckpointError for a config that cannot be read."""
    if dtype != "auto":
        return dtype
    if not device.startswith("cuda"):
        return "float32"
    config = read_target_config(resolve(target))
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return stored if stored in DTYPES else "float32"


def check_device(dtype: str, device: str) -> None:
    """Raises ConfigError for a dtype or device that torch does not have here. `auto` must have been resolved."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
