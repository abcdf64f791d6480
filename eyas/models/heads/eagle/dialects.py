"""How EAGLE heads are written down by different projects: their config.json and tensor names in, one spelling out.

The spelling is that of the first publication. Facts and their sources stand in docs/heads.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import CheckpointError

Settings = Mapping[str, Any]
Output = Literal["state", "normed", "bare"]

TAP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")

# Of tensor names: what is found, and the spelling that it stands for. A layer's number is spelled out afterwards.
SPELLINGS = (
    (r"^model\.", ""),
    (r"^fusion_fc\.", "fc."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^midlayer\.(?!\d)", "layers.0."),
    (r"^midlayers?\.(?=\d)", "layers."),
    (r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),
)


def fed_on(norm_output: bool) -> Output:
    """EAGLE-3.1's meaning: whether the normed state is what is fed on."""
    return "normed" if norm_output else "state"


def before_lm_head(norm_output: bool) -> Output:
    """SpecForge's meaning: whether lm_head reads the normed state."""
    return "state" if norm_output else "bare"


@dataclass(frozen=True)
class Dialect:
    """A way to write config.json.

    writes: whether a config.json is of this dialect. flatten: its settings on one level, under the names of the first
    publication, with the tapped layers as `taps`, by their inputs. norm_output: what that setting means for a head without a
    norm for each tapped state; for one with them, it is EAGLE-3.1's everywhere.
    """

    name: str
    writes: Callable[[Settings], bool]
    flatten: Callable[[Settings], dict[str, Any]]
    norm_output: Callable[[bool], Output] = fed_on


def dialect_of(config: Settings) -> Dialect:
    """The first that claims it."""
    return next(dialect for dialect in DIALECTS if dialect.writes(config))


def canonical(name: str, kind: str) -> str:
    """A tensor's name as the first publication of its kind, "eagle" or "eagle3", spells it."""
    for pattern, spelling in SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return re.sub(r"^layers\.0\.", "midlayer.", name) if kind == "eagle3" else name


def _architecture(*names: str) -> Callable[[Settings], bool]:
    return lambda config: bool(set(config.get("architectures") or ()) & set(names))


def _flat(config: Settings) -> dict[str, Any]:
    """Layer ids on the first level count inputs of layers."""
    return {**config, "taps": next((config[key] for key in TAP_KEYS if config.get(key)), None)}


def _with_eagle_config(config: Settings) -> dict[str, Any]:
    """Layer ids in eagle_config count outputs if they begin with 1, the lowest that is written so; else inputs."""
    nested = _nested(config, "eagle_config")
    taps = next((nested[key] for key in TAP_KEYS if nested.get(key)), None)
    if isinstance(taps, list) and taps[0] == 1 and all(isinstance(tap, int) for tap in taps):
        taps = [tap + 1 for tap in taps]
    flat = _flat(config)
    return {**flat, "taps": taps or flat["taps"]}


def _with_transformer_config(config: Settings) -> dict[str, Any]:
    """Sizes stand in a config of their own; what stands beside it goes first."""
    stated = {key: value for key, value in config.items() if value is not None}
    return _flat({**_nested(config, "transformer_layer_config"), **stated})


def _nested(config: Settings, key: str) -> Settings:
    """A config within a config, empty where there is none. Raises CheckpointError for what is none."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} in the head's config.json is {found!r}; it must be a mapping")
    return found


DIALECTS = (
    Dialect("vLLM speculators", lambda config: "speculators_model_type" in config, _with_transformer_config),
    Dialect(
        "SpecForge / SGLang",
        _architecture("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"),
        _with_eagle_config,
        norm_output=before_lm_head,
    ),
    Dialect("vLLM", _architecture("Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM"), _with_eagle_config),
    Dialect("SafeAILab", lambda config: True, _with_eagle_config),
)
