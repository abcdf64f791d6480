"""Reads checkpoints strictly: folders and hub ids, config.json, tensors, vocabularies.

Knows no module and no kind of head. Everything here raises CheckpointError for what it cannot read or accept.
"""

from __future__ import annotations

import difflib
import filecmp
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from eyas.config.file_values import check_source, check_values, read_json, shown
from eyas.config.gguf_files import local_folder
from eyas.config.target_limits import check_context, context_limit, quantisation, text_settings
from eyas.errors import CheckpointError, ConfigError, EyasError
from eyas.kernels.arguments import KVScales

log = logging.getLogger(__name__)

# Key of config.json under which `eyas check head --write` records a head's wiring. Fingerprints leave it out.
WIRING_KEY = "eyas"
# Most tensors that an error message names.
MAX_NAMED = 6
# Longest name that it shows whole.
MAX_NAME_LENGTH = 200
WEIGHT_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors", "pytorch_model.bin")
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.word_embeddings.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "backbone.embeddings.weight",
    "tok_embeddings.weight",
)
# The embedding may be tied to the lm_head.
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "output.weight", *EMBEDDING_NAMES)
# The scheme of torchao whose weights have the layouts of GPU kernels; no kernel of a CPU reads them.
PACKED_FOR_GPUS = "Int4WeightOnlyConfig"
# Quantised weights that are served, as transformers names them, and the packages that read them.
QUANTISATIONS: Mapping[str, tuple[str, ...]] = {
    "torchao": ("torchao",),
    "fp8": ("accelerate",),
    "mxfp4": ("accelerate",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
}
# Scales of the KV cache, as checkpoints for vLLM name them: of the attention, or of the projection.
KV_SCALE = re.compile(r"layers\.(?P<layer>\d+)\.self_attn\.(?:attn\.)?(?:(?P<of>[kv])_proj\.)?(?P<kind>[kv])_scale$")
# A layer of a text model, and the tensors that only a layer for multi-token prediction has.
TEXT_LAYER = re.compile(
    r"(?:(?:base_model|model|language_model|text_model|transformer|decoder|gpt_neox|backbone)\.)*(?:layers|h)\.(\d+)\.(.+)"
)
MTP_TENSORS = ("eh_proj.", "enorm.", "hnorm.", "shared_head.")
# What trainers' wrappers write before each name.
WRAPPER_PREFIX = re.compile(r"^(?:(?:module|_orig_mod|_fsdp_wrapped_module)\.)+")
# Tables that are computed from the config; files may hold them, and no loader reads them.
TABLE = re.compile(
    r"(?:^|\.)(?:inv_freq|original_inv_freq|cos_cached|sin_cached|cos_sin_cache|freqs_cis|position_ids|masked_bias|attn\.bias)$"
)
# Where trainers put the weights inside a file of torch.
NESTED_WEIGHTS = ("state_dict", "model_state_dict", "model", "module", "weights")
# Tensors of whole numbers that heads have.
INDEX_TENSORS = ("d2t", "t2d", "token_map")
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_CAUSE = 300


def resolve(path_or_id: str) -> Path:
    """Return the local folder of a checkpoint, see `local_folder`; a hub id is fetched into the hub's cache. Raises
    CheckpointError.
    """
    if (folder := local_folder(path_or_id)) is not None:
        return folder
    check_source(path_or_id)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_id, allow_patterns=["*.json", "*.safetensors", "*.bin", "*_lm_head.pt"]))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot fetch {path_or_id!r} from the hub, and no such folder exists: {error}") from error


class Checkpoint:
    """A folder of config and weights. Its config and the names of its tensors are read once, when first asked for.

    Everything that reads raises CheckpointError.

    Attributes:
        path: folder, GGUF file or hub id.
    """

    def __init__(self, path_or_id: str | Path) -> None:
        self.path = str(path_or_id)

    def __str__(self) -> str:
        return self.path

    @cached_property
    def folder(self) -> Path:
        """The local folder, see `resolve`."""
        return resolve(self.path)

    @property
    def config_file(self) -> Path:
        """The file of `config`, for errors."""
        return self.folder / "config.json"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config.json. Also a value that `CONFIG_VALUES` does not allow is an error."""
        config = read_json(self.config_file)
        check_values(config, self.config_file)
        return config

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config of a target's language model, which multimodal checkpoints nest."""
        return text_settings(self.config)

    @property
    def head_config(self) -> Mapping[str, Any]:
        """The config of a draft head. Quantised weights are an error: heads are served with plain ones."""
        if kind := quantisation(self.config):
            raise CheckpointError(
                f"{self.folder} holds a draft head quantised by {kind}, which Eyas does not serve; take the head with plain "
                "weights"
            )
        return self.config

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The file of each tensor, sharded or not.

        Names are without what a trainer's wrapper wrote before them; tables that are no weights are left out.
        """
        for file in (self.folder / name for name in WEIGHT_FILES):
            if file.suffix == ".json" and file.exists():
                return {own: shard for name, shard in _read_index(file).items() if (own := _own_name(name))}
            if file.exists():
                with _open_weights(file, "meta") as (names, _):
                    return dict.fromkeys(names, file)
        raise CheckpointError(f"{self.folder} holds no weights; expected one of {', '.join(WEIGHT_FILES)}")

    def tensors(self, own_names: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Read all tensors, from safetensors or pytorch_model.bin. own_names: files to look for first."""
        own = [self.folder / name for name in own_names if (self.folder / name).exists()]
        files = own[:1] or sorted(set(self.files.values()))
        return {name: tensor for file in files for name, tensor in _read_file(file)}

    def tensors_of(
        self, rename: Callable[[str], str], expected: Mapping[str, tuple[int, ...]], optional: Collection[str]
    ) -> dict[str, Tensor]:
        """Read all tensors of a head, under the names that `rename` gives them; others than `check_tensors` takes are an
        error.
        """
        read = self.tensors().items()
        # an unknown tensor keeps its name, for the error
        tensors = {own if (own := rename(name)) in expected else name: tensor for name, tensor in read}
        check_tensors(tensors, expected, optional, self.folder)
        return tensors

    def named(self, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors whose names begin with one of the prefixes, in the order of files and names."""
        for file in sorted(set(self.files.values())):
            yield from _read_file(file, prefixes)

    def part_of(self, rename: Callable[[str], str], expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Read the tensors of a head that `rename` gives these names; each must be there. Nothing else is read."""
        files = {rename(name): name for name in self.files}
        tensors = {name: self.tensor((files[name],)) for name in expected if name in files}
        check_tensors(tensors, expected, (), self.folder)
        return tensors

    def tensor(self, names: tuple[str, ...]) -> Tensor:
        """Read the first of `names` that the checkpoint holds; of safetensors nothing else is read."""
        for name in names:
            if name in self.files:
                return dict(_read_file(self.files[name], name))[name]
        raise CheckpointError(f"{self.folder} holds none of the tensors {', '.join(names)}")

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read these tensors, each file once; of safetensors nothing else is read."""
        found = dict[str, Tensor]()
        for file in sorted({self.files[name] for name in names}):
            with _open_weights(file) as (stored, get):
                found |= {name: get(name) for name in stored if name in names}
        return found

    def vocabulary(self, names: tuple[str, ...], shape: tuple[int, int]) -> Tensor:
        """Read the embedding or lm_head of a target, [V, C], for a head without its own. Another shape is an error."""
        tensor = self.tensor(names)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.folder}: {names[0]} has shape {list(tensor.shape)} and dtype {tensor.dtype}; the head needs "
                f"floating-point numbers of shape {list(shape)}"
            )
        return tensor


# A folder or hub id, or what has been opened already.
CheckpointSource = str | Path | Checkpoint


def open_checkpoint(source: CheckpointSource) -> Checkpoint:
    """Return the checkpoint, which reads its folder once, however many loaders it is given to."""
    return source if isinstance(source, Checkpoint) else Checkpoint(source)


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


def read_kv_scales(checkpoint: Checkpoint, num_layers: int) -> list[KVScales]:
    """Return the scales of keys and values with 8 bits that a checkpoint names, of all layers; nothing if it has none.

    Raises CheckpointError if it has some of them only, or one that is no positive number.
    """
    found: dict[tuple[int, str], float] = {}
    for name in checkpoint.files:
        match = KV_SCALE.search(name)
        if match is not None:
            found[int(match["layer"]), match["kind"]] = float(checkpoint.tensor((name,)).float().max())
    if not found:
        return []
    wanted = {(layer, kind) for layer in range(num_layers) for kind in "kv"}
    wrong = sorted(wanted ^ set(found)) or [place for place, scale in sorted(found.items()) if not 0 < scale < math.inf]
    if wrong:
        layer, kind = wrong[0]
        raise CheckpointError(
            f"{checkpoint} has scales of the KV cache, but the {kind}_scale of layer {layer} is missing or no positive "
            "number; leave all scales out, or write one of each kind for every layer"
        )
    return [KVScales(found[layer, "k"], found[layer, "v"]) for layer in range(num_layers)]


def _read_index(file: Path) -> dict[str, Path]:
    """Return the shard of each tensor. Raises CheckpointError for an index that is damaged, or names a file that is not
    there.
    """
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{file}: weight_map is {shown(shards)}; it must give the file of each tensor")
    found = {entry.name: entry for entry in file.parent.iterdir() if entry.is_file()}
    if missing := sorted(set(shards.values()) - set(found)):
        raise CheckpointError(
            f"{file}: weight_map names the file {shown(missing[0])}, which is not in {file.parent}; fetch it"
        )
    return {tensor: found[name] for tensor, name in shards.items()}


def _own_name(name: str) -> str:
    """Return a tensor's name without a trainer's prefix; empty for a table that is no weight."""
    return "" if TABLE.search(name) else WRAPPER_PREFIX.sub("", name)


def check_layers(names: Iterable[str], config: Any, source: object) -> None:
    """Raises CheckpointError for weights with more or fewer layers than the config asks for.

    Layers for multi-token prediction may follow, as DeepSeek and GLM write them.

    Args:
        names: of all tensors.
        config: transformers'. Towers for images and sound have names of their own, and are not looked at.
    """
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    if text.model_type == "longcat_flash":  # counts the two attentions of a layer as two
        num_layers = int(text.num_layers)
    num_mtp_layers: int = getattr(text, "num_nextn_predict_layers", None) or 0
    found = [(int(match[1]), match[2]) for name in names if (match := TEXT_LAYER.fullmatch(name))]
    extra = {layer for layer, rest in found if rest.startswith(MTP_TENSORS)}
    extra |= set(range(num_layers, num_layers + num_mtp_layers))
    held = {layer for layer, _ in found} - extra
    if held and max(held) + 1 != num_layers:
        raise CheckpointError(
            f"{source}: num_hidden_layers is {num_layers}, but the weights hold {max(held) + 1} layers; "
            "correct num_hidden_layers, or take weights without the others"
        )


def stored_shapes(checkpoint: Checkpoint) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape of each tensor of a checkpoint, and whether it holds plain floating-point numbers; no tensor is read."""
    found = {}
    for file in sorted(set(checkpoint.files.values())):
        if file.suffix == ".safetensors":
            with explained(f"cannot read weights {file}"), safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - no mapping
                    part = handle.get_slice(name)
                    found[name] = (tuple(part.get_shape()), part.get_dtype() in PLAIN_DTYPES)
        else:
            with _open_weights(file, "meta") as (names, get):
                found |= {name: (tuple(get(name).shape), get(name).is_floating_point()) for name in names}
    return found


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

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: str, rename: Callable[[str], str] | None = None
    ) -> None:
        """Reads no tensor. Raises CheckpointError for a folder without weights.

        rename: the name to give each tensor of `Checkpoint.files`, empty to leave it out; None keeps all names.
        """
        self.folder, self.dtype, self.bytes_read = checkpoint.folder, dtype, 0
        self._rename = rename or str
        self.device = device
        self._map = {own: file for name, file in checkpoint.files.items() if (own := self._rename(name))}
        self.names = frozenset(self._map)
        self._open: dict[Path, tuple[Any, dict[str, str]]] = {}

    @property
    def can_read_parts(self) -> bool:
        """Return whether all files are safetensors: others can only be read as a whole."""
        return all(file.suffix == ".safetensors" for file in self._map.values())

    def __getitem__(self, name: str) -> StoredTensor:
        """Raises CheckpointError for a file that cannot be read."""
        file = self._map[name]
        with explained(f"cannot read weights {file}"):
            handle, stored = self._opened(file)
            return StoredTensor(self, handle.get_slice(stored.get(name, name)))

    def map(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU in its own dtype. The file is mapped for it alone: what was read of it is freed
        with it.

        Raises CheckpointError for a file that cannot be read.
        """
        file = self._map[name]
        with explained(f"cannot read weights {file}"):
            _, stored = self._opened(file)
            handle: Any = safe_open(file, framework="pt")
            return cast(Tensor, handle.get_tensor(stored.get(name, name)))

    def _opened(self, file: Path) -> tuple[Any, dict[str, str]]:
        """Return an open file, and its own name for each tensor in `names`."""
        if file not in self._open:
            handle: Any = safe_open(file, framework="pt", device=self.device)
            stored = handle.keys()
            self._open[file] = handle, {self._rename(_own_name(name)): name for name in stored}
        return self._open[file]


def _read_file(file: Path, prefixes: str | tuple[str, ...] = "") -> Iterator[tuple[str, Tensor]]:
    """Yield tensors whose names begin with one of the prefixes, sorted by name; of safetensors no others are read."""
    with _open_weights(file) as (names, get):
        yield from ((name, get(name)) for name in names if name.startswith(prefixes))


@contextmanager
def _open_weights(file: Path, device: str = "cpu") -> Iterator[tuple[list[str], Callable[[str], Tensor]]]:
    """Sorted names of a file's tensors, as `Checkpoint.files` has them, and what reads one of them.

    Raises CheckpointError, also inside the block.
    """
    with explained(f"cannot read weights {file}"):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                stored = {own: name for name in handle.keys() if (own := _own_name(name))}  # noqa: SIM118 - no mapping
                yield sorted(stored), lambda name: handle.get_tensor(stored[name])
        else:
            tensors = _plain_tensors(torch.load(file, map_location=device, weights_only=True), file)
            yield sorted(tensors), tensors.__getitem__


def _plain_tensors(found: Any, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of torch, also where a trainer put them below another name. Raises CheckpointError."""
    while isinstance(found, Mapping) and (
        outer := [name for name in NESTED_WEIGHTS if isinstance(found.get(name), Mapping)]
    ):
        found = found[outer[0]]
    wrong = [value for value in found.values() if not isinstance(value, Tensor)] if isinstance(found, Mapping) else [found]
    if wrong:
        raise CheckpointError(f"{file} holds {shown(wrong[0])} beside tensors; expected tensors by name and nothing else")
    return {own: tensor for name, tensor in found.items() if (own := _own_name(name))}


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn what a library raises on a checkpoint inside the block into a CheckpointError of one line: problem, then cause.

    The log has the traceback, at level error if Eyas' own code raised it: a bug must not pass for a damaged file. Errors of
    Eyas, and a lack of memory, pass.
    """
    try:
        yield
    except (EyasError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.log(logging.ERROR if _is_own(error) else logging.DEBUG, "%s", problem, exc_info=True)
        raise CheckpointError(f"{problem}: {cause(error)}") from error


def _is_own(error: Exception) -> bool:
    """Return whether the last frame of an error is of this package, and no library has named the problem."""
    frames = list(walk_tb(error.__traceback__))
    package = Path(__file__).parents[1]
    own = bool(frames) and Path(frames[-1][0].f_code.co_filename).is_relative_to(package)
    return own and type(error).__module__ == "builtins" and not isinstance(error, OSError)


def cause(error: BaseException) -> str:
    """Return an error in one line of at most MAX_CAUSE characters, with its kind where the message alone says nothing."""
    text = " ".join(str(error).split())
    text = text if " " in text else f"{type(error).__name__} {text}".rstrip()
    return text if len(text) <= MAX_CAUSE else f"{text[:MAX_CAUSE]}..."


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], optional: Collection[str], source: Path
) -> None:
    """Raises CheckpointError unless `tensors` are exactly `expected`, shapes included; `optional` ones may be absent."""
    missing = sorted(set(expected) - set(tensors) - set(optional))
    unexpected = sorted(set(tensors) - set(expected))
    unexpected[:MAX_NAMED] = [_with_nearest(name, expected) for name in unexpected[:MAX_NAMED]]
    wrong = [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    wrong += [problem for name, tensor in tensors.items() if name in expected and (problem := _wrong_numbers(name, tensor))]
    problems = [f"{what} {shortened(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if problems := problems + wrong[:MAX_NAMED]:
        raise CheckpointError(f"{source} does not fit its config: {'; '.join(problems)}")


def _wrong_numbers(name: str, tensor: Tensor) -> str:
    """Return what is wrong with the numbers of a head's tensor; empty if nothing is."""
    if name in INDEX_TENSORS:
        return f"{name} has dtype {tensor.dtype}, expected whole numbers" if tensor.is_floating_point() else ""
    if not tensor.is_floating_point():
        return f"{name} has dtype {tensor.dtype}, expected floating-point numbers"
    return "" if is_finite(tensor) else f"{name} holds NaN or infinity"


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite. A sum is several times faster than a look at each; it may only overflow."""
    plain = tensor if tensor.itemsize > 1 else tensor.float()
    return bool(plain.sum(dtype=torch.float32).isfinite()) or bool(plain.isfinite().all())


def shortened(names: Sequence[str]) -> str:
    """Return the first MAX_NAMED of these names, and how many more there are."""
    first = [name if name.isprintable() and len(name) <= MAX_NAME_LENGTH else shown(name) for name in names[:MAX_NAMED]]
    return ", ".join(first) + f" and {len(names) - MAX_NAMED} more" * (len(names) > MAX_NAMED)


def _with_nearest(name: str, expected: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name[:MAX_NAME_LENGTH], list(expected), n=1)
    return f"{name} (nearest is {near[0]})" if near else name


def check_vocabulary(draft_model: CheckpointSource, target: CheckpointSource) -> None:
    """Raises CheckpointError unless both vocabularies have the same size and every token has the same id in both.

    Ids are compared where both folders hold a tokenizer.json. Reads no weights.
    """
    draft_model, target = open_checkpoint(draft_model), open_checkpoint(target)
    draft_size, target_size = (checkpoint.text_config.get("vocab_size") for checkpoint in (draft_model, target))
    if draft_size != target_size:
        raise CheckpointError(
            f"the draft model {draft_model} has a vocabulary of {draft_size}, the target {target} one of {target_size}; "
            "take a draft model that was made with the target's vocabulary"
        )
    folders = draft_model.folder, target.folder
    files = [folder / "tokenizer.json" for folder in folders]
    if all(file.is_file() for file in files) and filecmp.cmp(files[0], files[1], shallow=False):
        return  # to parse a large one twice takes seconds
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
    """Return the vocabulary of the folder's tokenizer.json, added tokens included; empty if there is no such file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"cannot read {file}: {cause(error)}") from error


def context_length(config: Any, max_model_len: int, name: str) -> int:
    """Return the most tokens of prompt and output together: max_model_len, or the model's own limit for 0.

    config: transformers' of the model. Raises ConfigError above that limit.
    """
    check_context(max_model_len, int(config.get_text_config().max_position_embeddings), name)
    limit = context_limit(config)
    if max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but Eyas serves {name!r} with {limit} tokens (index_topk in its "
            "config.json): with more, its indexers would choose which of them a token attends to; lower it, or leave it out"
        )
    return max_model_len or limit
