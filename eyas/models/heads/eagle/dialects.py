"""How EAGLE heads are written down by different projects: their config.json and tensor names in, one spelling out.

The spelling is that of the first publication. Facts and their sources stand in docs/heads.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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


@dataclass(frozen=True)
class Foreign:
    """Heads that look like EAGLE's, and are others. what: in words, with what makes them so. settings: keys of config.json
    that only they have, if set. words: in the names of their architecture or model type, in lower case. tensors: ends of
    names that only they have."""

    what: str
    settings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def claims(self, config: Settings, names: Iterable[str]) -> bool:
        """Whether a head is one of these."""
        called = (*(config.get("architectures") or ()), config.get("model_type"), config.get("speculators_model_type"))
        return (
            any(config.get(key) for key in self.settings)
            or any(word in str(name).lower() for name in called for word in self.words)
            or any(name.endswith(self.tensors) for name in names if self.tensors)
        )


def foreign(config: Settings, names: Iterable[str]) -> str:
    """What a head is, if it is none of EAGLE's; else empty. names: of its tensors."""
    names = tuple(names)
    return next((other.what for other in FOREIGN if other.claims(config, names)), "")


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

FOREIGN = (
    Foreign(
        "a block diffusion head (DFlash or one of its kin), which drafts a block of tokens at once",
        settings=("dflash_config",),
        words=("dflash", "dspark", "domino"),
    ),
    Foreign(
        "a P-EAGLE head, which drafts all levels in one pass",
        settings=("parallel_drafting", "ptd_token_id"),
        words=("peagle",),
        tensors=("mask_hidden",),
    ),
    Foreign(
        "a HASS head with norms of its own over embeddings and features; those without load as eagle2",
        settings=("add_para_norm", "layernorms"),
        tensors=("embedding_layernorm.weight", "hidden_states_layernorm.weight", "enorm.weight", "hnorm.weight"),
    ),
    Foreign("a head with a norm of its own before lm_head", tensors=("pre_lm_head_layernorm.weight",)),
    Foreign("a head with norms of queries and keys", tensors=("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
)
