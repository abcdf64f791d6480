"""Unpacks a GGUF file into a folder that every loader reads: `python -m eyas.models.unpacking FILE FOLDER`.

Transformers reads the file. Each tensor takes the smallest floating-point type that holds all of its numbers exactly.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from eyas.config.file_values import shown
from eyas.config.gguf_files import MARK
from eyas.config.gguf_header import GgufHeader, StoredBlock, read_header
from eyas.errors import CheckpointError, EyasError
from eyas.models.checkpoint import explained, shortened
from eyas.models.supported import inspect_architecture

# Tokens that end an answer, besides the end of a sequence: files name one of them at most, and llama.cpp knows them all.
END_TOKENS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|eom_id|>"),
    *("<|end_of_text|>", "<|return|>", "<|call|>", "<EOT>", "_<EOT>"),
)
CONTROL_TOKEN = 3
PLAIN_KINDS = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)
# Transformers reads no scaling of RoPE from a file. What a file says of YaRN, by its names there and in rope_parameters.
YARN = {
    "scaling.original_context_length": "original_max_position_embeddings",
    "scaling.yarn_beta_fast": "beta_fast",
    "scaling.yarn_beta_slow": "beta_slow",
}
# Keys that are not restored, with the values that scale nothing; YaRN's extrapolation depends on the type.
NEUTRAL = {
    "scaling.attn_factor": (1,),
    "scaling.yarn_attn_factor": (1,),
    "scaling.yarn_log_multiplier": (0,),
    "scaling.alpha": (0, 1),
}
# Keys that describe a model and scale nothing, unless it is YaRN.
NOTES = ("scaling.finetuned", "scaling.original_context_length")
# How Llama 3.1 and later scale it; files hold the result, a divisor of each frequency.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_FACTORS = (8.0, 32.0)
SHARD_SIZE = "2GB"


def unpack(file: Path, folder: Path) -> list[str]:
    """Write the config, weights and tokenizer of a GGUF file into a folder. Returns warnings.

    Raises CheckpointError for a file that is damaged, does not fit the disk, or holds what is not served.
    """
    header = read_header(file)
    _check_tensors(header.tensors, file)
    _check_space(header, file, folder.parent)
    # transformers makes one for the config and one for the weights, each in half a minute where the vocabulary is large
    gguf.GGUFReader = cache(gguf.GGUFReader)
    config = _config(file, header)
    try:
        inspect_architecture(config)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    folder.mkdir(parents=True)
    _save_weights(_weights(file, config), folder)
    _save_config(config, header, folder)
    return _save_tokenizer(file, folder)


@cache
def readable_kinds() -> tuple[str, ...]:
    """Return the names of the kinds of numbers that the installed package `gguf` can unpack."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            gguf.dequantize(block, kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return tuple(found)


def _check_tensors(tensors: Sequence[StoredBlock], file: Path) -> None:
    """Raise CheckpointError for kinds of numbers that cannot be read, and for a file that ends before its last tensor."""
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    kinds = {names.get(tensor.kind, f"number {tensor.kind}") for tensor in tensors}
    if unknown := sorted(kinds - set(readable_kinds())):
        raise CheckpointError(
            f"{file} holds weights of the kind {', '.join(unknown)}, which the installed package gguf cannot unpack; take a "
            "file of another kind, such as Q4_K_M, Q8_0 or F16"
        )
    sizes = gguf.GGML_QUANT_SIZES
    end = 0
    for tensor in tensors:
        block, num_bytes = sizes[gguf.GGMLQuantizationType(tensor.kind)]
        end = max(end, tensor.offset + -(-tensor.count // block) * num_bytes)
    if (size := file.stat().st_size) < end:
        raise CheckpointError(f"{file} has {size} bytes, but its tensors end at {end}: it is truncated; fetch it again")


def _check_space(header: GgufHeader, file: Path, parent: Path) -> None:
    """Raise CheckpointError unless the disk has room for the weights."""
    halves = {kind.value for kind in PLAIN_KINDS[1:]}
    needed = sum(tensor.count * (2 if tensor.kind in halves else 4) for tensor in header.tensors)
    if (free := shutil.disk_usage(parent).free) < needed * 1.05:
        raise CheckpointError(
            f"{file} takes {needed / 2**30:.1f} GiB unpacked, and {parent} has {free / 2**30:.1f} GiB free; name another "
            "place in the environment variable HF_HOME"
        )


def _config(file: Path, header: GgufHeader) -> Any:
    """Return transformers' config of a file, with the scaling of RoPE that it leaves out."""
    from transformers import AutoConfig

    with explained(f"transformers cannot read the config of {file}, whose architecture is {header.architecture!r}"):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    for name in ("quantization_config", "_name_or_path", "transformers_version"):
        config.__dict__.pop(name, None)
    if scaling := _rope_scaling(file, header):
        parameters = config.rope_parameters
        whole = parameters.get("full_attention", parameters)  # Gemma 3 scales it in layers without a window only
        if whole.get("rope_type", "default") == "default":
            whole |= scaling
    return config


def _rope_scaling(file: Path, header: GgufHeader) -> dict[str, Any]:
    """Return what rope_parameters lack. Raises CheckpointError for a scaling that cannot be restored."""
    begins = f"{header.architecture}.rope."
    given = {key.removeprefix(begins): value for key, value in header.metadata.items() if key.startswith(f"{begins}scal")}
    kind = given.pop("scaling.type", "linear")  # so llama.cpp reads a factor without a type
    factor = given.pop("scaling.factor", given.pop("scale_linear", 1)) or 1
    found: dict[str, Any] = {}
    if kind == "yarn" or (kind == "linear" and factor != 1):
        found = {"rope_type": kind, "factor": factor}
    elif kind not in ("linear", "none"):
        raise _not_read(file, f"rope.scaling.type = {kind}")
    elif factor != 1:
        raise _not_read(file, f"rope.scaling.factor = {factor} of the type {kind}")
    if kind == "yarn":
        found |= {own: given.pop(key) for key, own in YARN.items() if key in given}
    neutral = {**NEUTRAL, "scaling.yarn_ext_factor": (-1, 1 if kind == "yarn" else 0)}
    for key, value in given.items():
        if key not in NOTES and value not in neutral.get(key, ()):
            raise _not_read(file, f"rope.{key} = {value}")
    if wrong := {key: value for key, value in found.items() if key != "rope_type" and type(value) not in (int, float)}:
        raise CheckpointError(f"{file}: its scaling of rotary embeddings has no numbers: {shown(wrong)}; fetch it again")
    tensors = [tensor for tensor in header.tensors if tensor.name.startswith("rope_f")]
    for tensor in tensors:
        if found or tensor.name != "rope_freqs.weight":
            raise _not_read(file, tensor.name)
        return _llama3_scaling(file, tensor, float(header.own("rope.freq_base") or 10000))
    return found


def _not_read(file: Path, what: str) -> CheckpointError:
    """Return the error for a scaling that cannot be restored."""
    return CheckpointError(
        f"{file} scales its rotary embedding by {what}, which is not read from GGUF files; take the model's checkpoint of "
        "safetensors"
    )


def _llama3_scaling(file: Path, tensor: StoredBlock, base: float) -> dict[str, Any]:
    """Return the scaling of Llama 3 whose divisors a file holds, [D / 2]; nothing if all are 1. Raises CheckpointError."""
    if tensor.kind != gguf.GGMLQuantizationType.F32:
        raise _not_read(file, f"{tensor.name}, which is not in float32")
    stored = np.memmap(file, np.float32, "r", tensor.offset, (tensor.count,))
    if np.all(stored == 1):
        return {}
    for factor in LLAMA3_FACTORS:
        if np.allclose(stored, llama3_divisors(tensor.count, base, factor), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise CheckpointError(
        f"{file}: its rope_freqs.weight is not how Llama 3 scales rotary embeddings; take the model's checkpoint of "
        "safetensors"
    )


def llama3_divisors(count: int, base: float, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return by what Llama 3 divides each of its `count` frequencies: 1 for high ones, `factor` for low ones."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] * base ** (-np.arange(count) / count) / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)


def _weights(file: Path, config: Any) -> dict[str, Tensor]:
    """Return the weights of a file by their names in transformers, in float32. Raises CheckpointError."""
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    architecture: Any = AutoModelForCausalLM
    no_defaults: Any = GenerationConfig
    with explained(f"transformers cannot read the weights of {file}"):
        model, report = architecture.from_pretrained(
            file.parent, gguf_file=file.name, config=config, quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32, generation_config=no_defaults(), output_loading_info=True,
        )  # fmt: skip
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{file} lacks tensors that its architecture asks for: {shortened(missing)}")
    weights: dict[str, Tensor] = model.state_dict()
    if config.get_text_config().tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def _save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write the weights, in files of a bounded size: what writes one copies it."""
    from huggingface_hub import save_torch_state_dict

    for name in list(weights):
        weights[name] = smallest(weights[name])
    save_torch_state_dict(weights, folder, max_shard_size=SHARD_SIZE)


def smallest(tensor: Tensor) -> Tensor:
    """Return the tensor in the smallest floating-point type in which no number of it changes."""
    for dtype in (torch.bfloat16, torch.float16):
        rounded = tensor.to(dtype)
        if torch.equal(rounded.float(), tensor):
            return rounded
    return tensor


def _save_config(config: Any, header: GgufHeader, folder: Path) -> None:
    """Write config.json and generation_config.json. A GPU serves blocks in bfloat16, unless --dtype says otherwise."""
    kinds = {tensor.kind for tensor in header.tensors if len(tensor.shape) > 1}
    served = {0: "float32", 1: "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
    values = {key: value for key, value in config.to_dict().items() if value is not None}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        values.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**values, "dtype": served}, indent=1) + "\n")
    ends = {"eos_token_id": end_ids(header.metadata, values.get("eos_token_id"))}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1) + "\n")


def end_ids(metadata: Mapping[str, Any], stated: int | Iterable[int] | None) -> list[int]:
    """Return the tokens that end an output: those that the file states, and control tokens that have their names."""
    own = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    own += [stated] if stated is None or isinstance(stated, int) else list(stated)
    types = metadata.get("tokenizer.ggml.token_type") or ()
    tokens = zip(metadata.get("tokenizer.ggml.tokens") or (), types, strict=False)
    named = [id_ for id_, (token, kind) in enumerate(tokens) if kind == CONTROL_TOKEN and token in END_TOKENS]
    return list(dict.fromkeys(id_ for id_ in (*own, *named) if id_ is not None))


def _save_tokenizer(file: Path, folder: Path) -> list[str]:
    """Write tokenizer and chat template. One that cannot be read is a warning: another may be named."""
    from transformers import AutoTokenizer

    try:
        with explained("transformers cannot read its tokenizer"):
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except CheckpointError as error:
        return [f"{error}; name a folder with a tokenizer.json: --tokenizer"]
    return []


def _main() -> int:
    """Unpack the file of the command line; print warnings, or why not, in lines that are marked: libraries print too."""
    logging.basicConfig(level=logging.ERROR)
    file, folder = map(Path, sys.argv[1:])
    status = 0
    try:
        lines = unpack(file, folder)
    except EyasError as error:
        lines = [str(error)]
        status = 1
    for line in lines:
        print(f"\n{MARK}{' '.join(line.splitlines())}")
    return status


if __name__ == "__main__":
    sys.exit(_main())
