"""Reads checkpoints: a folder or hub id in, config and tensors out, strictly. Knows no module of ours.

Whether two models speak of the same tokens: two checkpoints in, an error out. Reads no weights.

Single settings of a head's config.json: a mapping and a key in, a checked value out. Knows no kind of head.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.config import Dtype
from eyas.errors import CheckpointError, ConfigError

# What Eyas itself has written into a head's config.json: how to read it. No part of what the head is.
WIRING_KEY = "eyas"
# Of tensors that are missing, left over or of another shape.
MOST_NAMED = 12
DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")
WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


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
    """All tensors of a checkpoint, from safetensors or pytorch_model.bin, sharded or not; or from the first of the files
    `own_names` that is there. Raises CheckpointError."""
    for name in own_names:
        if (folder / name).exists():
            return _read_file(folder / name)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(_weight_map(folder).values()) or {_weight_file(folder)}):
        tensors.update(_read_file(file))
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors of a checkpoint. Raises CheckpointError."""
    if weight_map := _weight_map(folder):
        return set(weight_map)
    file = _weight_file(folder)
    if file.suffix != ".safetensors":
        return set(_read_file(file))
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read weights {file}: {error}") from error


def read_tensor(folder: Path, names: tuple[str, ...]) -> Tensor:
    """The first of `names` that the checkpoint holds, read alone where the format allows. Raises CheckpointError."""
    weight_map = _weight_map(folder)
    files = {name: weight_map[name] for name in names if name in weight_map}
    file = next(iter(files.values())) if files else _weight_file(folder)
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as handle:
            found = [name for name in names if name in handle.keys()]  # noqa: SIM118  (not a dict)
            if found:
                return cast(Tensor, handle.get_tensor(found[0]))
    else:
        tensors = _read_file(file)
        found = [name for name in names if name in tensors]
        if found:
            return tensors[found[0]]
    raise CheckpointError(f"{folder} holds none of the tensors {', '.join(names)}")


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


def take(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], optional: set[str], source: Path) -> None:
    """Raises CheckpointError unless `tensors` are exactly `expected`, shapes included; `optional` ones may be absent."""
    missing = sorted(set(expected) - set(tensors) - optional)
    unexpected = [_beside_nearest(name, expected) for name in sorted(set(tensors) - set(expected))]
    wrong = [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    named = {"missing": missing, "unexpected": unexpected}
    problems = [f"{what} {_first(names)}" for what, names in named.items() if names] + wrong[:MOST_NAMED]
    if problems:
        raise CheckpointError(f"{source} does not fit its config: {'; '.join(problems)}")


def _first(names: Sequence[str]) -> str:
    """As many as anyone reads."""
    return ", ".join(names[:MOST_NAMED]) + f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED)


def _beside_nearest(name: str, expected: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(expected), n=1)
    return f"{name} (nearest is {near[0]})" if near else name


def target_fingerprint(path_or_id: str) -> str:
    """Digest of a target's config and weights; equal on every machine that holds the same checkpoint."""
    return _digest(resolve(path_or_id), names=None)


def head_fingerprint(path_or_id: str) -> str:
    """Digest of what decides a head's fused features: its config, its fc and the norms before that."""
    fused = ("fc.", "fc_norm.", "input_norm.")
    return _digest(resolve(path_or_id), names=(*fused, *(f"model.{name}" for name in fused)))


def _digest(folder: Path, names: tuple[str, ...] | None) -> str:
    """Hash config.json and, of each tensor, name, shape, dtype and some 16,000 elements spread over it."""
    config = {key: value for key, value in read_config(folder).items() if key != WIRING_KEY}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in _iterate(folder, ("",) if names is None else names):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        sample = tensor.flatten()[:: max(1, tensor.numel() // 16384)].contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _iterate(folder: Path, beginnings: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Tensors whose names begin so; of safetensors no others are read."""
    for file in sorted(set(_weight_map(folder).values()) or {_weight_file(folder)}):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                for name in sorted(name for name in handle.keys() if name.startswith(beginnings)):  # noqa: SIM118
                    yield name, handle.get_tensor(name)
        else:
            yield from sorted((name, tensor) for name, tensor in _read_file(file).items() if name.startswith(beginnings))


def _weight_map(folder: Path) -> dict[str, Path]:
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


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  (not a dict)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"cannot read weights {file}: {error}") from error


def check_vocabulary(draft: str, target: str) -> None:
    """Raises CheckpointError unless both vocabularies have the same size and, where both folders hold a tokenizer.json,
    every token the same id."""
    folders = resolve(draft), resolve(target)
    mine, its = (read_target_config(folder).get("vocab_size") for folder in folders)
    if mine != its:
        raise CheckpointError(
            f"the draft model {draft} has a vocabulary of {mine}, the target {target} one of {its}; take a draft model that "
            "was made with the target's vocabulary"
        )
    own, wanted = (_token_ids(folder) for folder in folders)
    differing = sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token))
    if own and wanted and differing:
        token = differing[0]
        first, second = (ids.get(token, "missing") for ids in (own, wanted))
        raise CheckpointError(
            f"the draft model {draft} has another tokenizer than the target {target}: {len(differing)} tokens differ, "
            f"such as {token!r}, which is {first} in the one and {second} in the other"
        )


def _token_ids(folder: Path) -> dict[str, int]:
    """The vocabulary of the folder's tokenizer.json, added tokens included; empty where there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"cannot read {file}: {error}") from error


def get_int(config: Mapping[str, Any], key: str, source: object, default: int | None = None) -> int:
    """A setting of a config.json. Raises CheckpointError when it is no whole number and there is no default."""
    value = config.get(key) or default
    if not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a whole number")
    return value


def real(config: Mapping[str, Any], key: str, source: object, default: float) -> float:
    """A setting of a config.json. Raises CheckpointError when it is no number."""
    value = config.get(key) or default
    if not isinstance(value, int | float):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, source: object, default: bool = False) -> bool:
    """A setting of a config.json. Raises CheckpointError when it is neither true nor false."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be true or false")
    return value
