"""The table of values that Eyas reads from a checkpoint's JSON files, with their ranges; and the reading of such a file.

A value outside its range is an error of one line, with file, key and value.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar

from eyas.config.gguf_files import gguf_file
from eyas.errors import CheckpointError

Kind = Literal[
    "whole number", "number", "true or false", "text", "list of texts", "mapping", "token ids", "whole numbers",
    "text, or an object with it as content", "text, or texts by name",
]  # fmt: skip
Setting = TypeVar("Setting", int, float, bool, str)
# The largest number that a float can have; whole numbers of JSON may be larger.
LARGEST = sys.float_info.max
# Most characters of a value that an error shows.
MAX_SHOWN = 80
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
# Mappings inside a config.json whose values are checked too; others belong to transformers or to other parts of a model.
NESTED = ("text_config", "transformer_layer_config", "dflash_config", "eagle_config", "rope_parameters", "rope_scaling")
KINDS: Mapping[type, Kind] = {int: "whole number", float: "number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class FileValue:
    """Range or choices of a value.

    Attributes:
        low, high: of numbers, both allowed unless is_open, which forbids `low`.
        choices: of texts.
    """

    kind: Kind
    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False
    choices: tuple[str, ...] = ()

    def holds(self, value: object) -> bool:
        """Return whether a value is of this kind and in this range. Left out (null) is always right."""
        match self.kind:
            case "whole number":
                return type(value) is int and self._is_inside(value)
            case "whole numbers":
                numbers = value if isinstance(value, list) else [value]
                return bool(numbers) and all(type(item) is int and self._is_inside(item) for item in numbers)
            case "number":
                return type(value) in (int, float) and self._is_inside(value)  # type: ignore[arg-type]
            case "true or false":
                return isinstance(value, bool)
            case "text, or an object with it as content":
                return is_text(value.get("content") if isinstance(value, dict) else value)
            case "text, or texts by name":
                named = named_texts(value)
                return bool(named) and all(map(is_text, named.values()))
            case "text":
                return is_text(value) and (not self.choices or value.removeprefix("torch.") in self.choices)
            case "mapping":
                return isinstance(value, dict)
        items = value if isinstance(value, list) else [value] if self.kind == "token ids" else None
        return items is not None and all(type(item) is (int if self.kind == "token ids" else str) for item in items)

    def _is_inside(self, value: float) -> bool:
        return (value > self.low if self.is_open else value >= self.low) and value <= self.high and abs(value) <= LARGEST

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        low = f" {'above' if self.is_open else 'from'} {self.low:.12g}" if self.low > -math.inf else ""
        high = f" to {self.high:.12g}" if self.high < math.inf else ""
        article = "" if self.kind.startswith(("text", "true", "token", "whole numbers")) else "a "
        return f"{article}{self.kind}{low}{high}"


COUNT = FileValue("whole number", 1, 2**24)
FROM_ZERO = FileValue("whole number", 0, 2**24)
POSITIVE = FileValue("number", 0, is_open=True)
EPSILON = FileValue("number", 0, 1, is_open=True)
SHARE = FileValue("number", 0, 1, is_open=True)
FLAG, TEXT, TEXTS, MAPPING = (FileValue(kind) for kind in ("true or false", "text", "list of texts", "mapping"))
TOKENS = FileValue("token ids")
DTYPE = FileValue("text", choices=("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "auto"))

# Of config.json, by what reads them. A key means the same in every file.
MODEL_VALUES: Mapping[str, FileValue] = {
    "architectures": TEXTS,
    "model_type": TEXT,
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "text_config": MAPPING,
    "quantization_config": MAPPING,
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "n_embd": COUNT,
    "intermediate_size": FileValue("whole numbers", 1, 2**24),
    "num_hidden_layers": FileValue("whole number", 1, 4096),
    "n_layer": FileValue("whole number", 1, 4096),
    "num_attention_heads": COUNT,
    "n_head": COUNT,
    "num_key_value_heads": COUNT,
    "max_position_embeddings": FileValue("whole number", 1, 2**27),
    "n_positions": FileValue("whole number", 1, 2**27),
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "activation_function": TEXT,
    "rms_norm_eps": EPSILON,
    "layer_norm_eps": EPSILON,
    "layer_norm_epsilon": EPSILON,
    "norm_epsilon": EPSILON,
    "sliding_window": COUNT,
    "index_topk": COUNT,
    "use_sliding_window": FLAG,
    "head_dim": FROM_ZERO,
    "max_window_layers": FROM_ZERO,
    "layer_types": TEXTS,
    "attn_logit_softcapping": POSITIVE,
    "query_pre_attn_scalar": POSITIVE,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "num_experts": FROM_ZERO,
    "num_local_experts": FROM_ZERO,
    "num_experts_per_tok": FROM_ZERO,
    "num_nextn_predict_layers": FROM_ZERO,
    "norm_topk_prob": FLAG,
    "is_encoder_decoder": FLAG,
    "eos_token_id": TOKENS,
    "bos_token_id": TOKENS,
    "pad_token_id": TOKENS,
}
ROPE_VALUES: Mapping[str, FileValue] = {
    "rope_parameters": MAPPING,
    "rope_scaling": MAPPING,
    "full_attention": MAPPING,
    "sliding_attention": MAPPING,
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    "rope_local_base_freq": POSITIVE,
    "partial_rotary_factor": SHARE,
    "factor": POSITIVE,
    "attention_factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "original_max_position_embeddings": FileValue("whole number", 1, 2**27),
}
HEAD_VALUES: Mapping[str, FileValue] = {
    "speculators_config": MAPPING,
    "eyas_num_depths": FileValue("whole number", 1, 64),
    "speculators_model_type": TEXT,
    "projector_type": TEXT,
    "transformer_layer_config": MAPPING,
    "dflash_config": MAPPING,
    "eagle_config": MAPPING,
    "draft_vocab_size": COUNT,
    "target_hidden_size": COUNT,
    "num_target_layers": FileValue("whole number", 1, 4096),
    "norm_before_residual": FLAG,
    "norm_before_fc": FLAG,
    "norm_output": FLAG,
    "fc_norm": FLAG,
    "bias": FLAG,
    "qkv_bias": FLAG,
    "block_size": FileValue("whole number", 1, 4096),
    "mask_token_id": FROM_ZERO,
    "pard_token": FROM_ZERO,
    "ptd_token_id": FROM_ZERO,
    "sample_from_anchor": FLAG,
    "sliding_window_non_causal": FLAG,
    "markov_rank": FROM_ZERO,
    "markov_head_type": TEXT,
    "enable_confidence_head": FLAG,
    "confidence_head_with_markov": FLAG,
    "conv_kernel_size": COUNT,
    "conv_group_size": COUNT,
    "selector_rank": COUNT,
    "selector_top_k": COUNT,
    "output_multiplier": POSITIVE,
    "logit_scale": POSITIVE,
    "final_logit_softcapping": FileValue("number", 0),
    "original_lm_head": FLAG,
    "hydra_num_heads": FileValue("whole number", 1, 64),
    "hydra_num_layers": FileValue("whole number", 1, 64),
    "hydra_head_arch": TEXT,
    "grounded_heads": FLAG,
}
SPECIAL_TOKEN = FileValue("text, or an object with it as content")
TOKENIZER_VALUES: Mapping[str, FileValue] = {
    "bos_token": SPECIAL_TOKEN,
    "eos_token": SPECIAL_TOKEN,
    "unk_token": SPECIAL_TOKEN,
    "pad_token": SPECIAL_TOKEN,
    "sep_token": SPECIAL_TOKEN,
    "cls_token": SPECIAL_TOKEN,
    "mask_token": SPECIAL_TOKEN,
    "add_bos_token": FLAG,
    "chat_template": FileValue("text, or texts by name"),
}
CONFIG_VALUES = {**MODEL_VALUES, **ROPE_VALUES, **HEAD_VALUES}


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises CheckpointError, also for a key that stands twice with different
    values.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:  # a file that is nested too deeply ends in the latter
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}; expected a JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next((key for key, value in pairs if found[key] != value), None)
        if twice is not None:
            raise ValueError(f"{twice} stands twice in one object, with different values")
    return found


def check_values(config: Mapping[str, Any], source: object, values: Mapping[str, FileValue] = CONFIG_VALUES) -> None:
    """Raises CheckpointError for the first value that is not what the table says."""
    for place, key, value in _places(config):
        known = values.get(key)
        if known is not None and value is not None and not known.holds(value):
            raise CheckpointError(f"{source}: {place} is {shown(value)}; it must be {known}")


def _places(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, key, value) of the values of a mapping, and of the mappings in it that Eyas reads."""
    for key, value in config.items():
        yield f"{within}{key}", key, value
        is_rope = within.startswith(("rope_", "text_config.rope_"))  # by the type of a layer
        if isinstance(value, dict) and (key in NESTED or is_rope):
            yield from _places(value, f"{within}{key}.")


def get_setting(
    kind: type[Setting], config: Mapping[str, Any], key: str, source: object, default: Setting | None = None
) -> Setting:
    """Return an int, float, bool or text of a config.json.

    Raises CheckpointError for a value that is not what the table says, and if it is left out, unless there is a default.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    known = CONFIG_VALUES.get(key, FileValue(KINDS[kind]))
    if value is None or not known.holds(value) or isinstance(value, list):
        is_what = "left out" if value is None else shown(value)
        raise CheckpointError(f"{source}: {key} is {is_what}; it must be {known}")
    return kind(value)


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text that can be encoded: JSON may hold half a surrogate pair."""
    return isinstance(value, str) and _HALF_A_PAIR.search(value) is None


def named_texts(value: object) -> dict[str, object]:
    """Return entries of a mapping, of a list of objects with name and template, or of one text as `default`; else none."""
    if isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in value):
        return {one["name"]: one.get("template") for one in value}
    return value if isinstance(value, dict) else {"default": value} if isinstance(value, str) else {}


def shown(value: object) -> str:
    """Return a value for an error, at most MAX_SHOWN characters of it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def check_source(source: str) -> None:
    """Checks that a source is a folder, a GGUF file or a possible hub id. Raises CheckpointError; asks no hub."""
    if gguf_file(source) is not None:
        return
    is_path = Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") > 1
    if is_path and not Path(source).is_dir():
        raise CheckpointError(
            f"no checkpoint folder at {source!r}; give a folder that holds config.json, a GGUF file, or a hub id"
        )
