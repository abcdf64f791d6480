"""vLLM's arguments, as settings of Eyas: what `vllm.LLM` and its `speculative_config` take. Others are refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from eyas.config.drafting import MTP, DraftQuantization, MethodsConfig, TreeConfig
from eyas.config.engine import EngineConfig
from eyas.errors import ConfigError

# Arguments of vLLM with another name here, and the change of the value.
_RENAMED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "enable_prefix_caching": ("prefix_cache", bool),
    "max_num_batched_tokens": ("max_prefill_tokens", int),
    "enforce_eager": ("cuda_graphs", lambda value: not value),
}
_STRUCTURED = "structured_outputs_config"
# Arguments of vLLM that Eyas does not have, with the values that ask for nothing, and what to do instead of another one.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "Eyas runs no code of a checkpoint; docs/models.md lists the models"),
    "pipeline_parallel_size": ((1,), "use tensor_parallel_size"),
    "data_parallel_size": ((1,), "run several verifiers behind a router"),
    "swap_space": ((0, None), "the KV cache stays on the device; set max_kv_tokens"),
    "cpu_offload_gb": ((0,), "weights stay on the device; use tensor_parallel_size"),
    "enable_lora": ((False, None), "merge the adapter into the checkpoint"),
    "enable_chunked_prefill": ((True, None), "prompts are always prefilled in chunks; set max_prefill_tokens"),
    "load_format": (("auto", "safetensors"), "Eyas reads safetensors and torch files"),
    "revision": ((None, "main"), "give the folder of the fetched revision as model"),
    "tokenizer_revision": ((None, "main"), "put the tokenizer into the model's folder"),
    "tokenizer_mode": (("auto",), "the tokenizer is tokenizer.json of the model's folder"),
    "skip_tokenizer_init": ((False,), "LLM always loads the tokenizer"),
    "distributed_executor_backend": ((None, "mp"), "LLM starts tensor-parallel workers itself; eyas.services.ray uses Ray"),
    "speculative_model": ((None,), "use speculative_config, or draft_model"),
    "num_speculative_tokens": ((None,), "use speculative_config, or tree"),
    "max_seq_len_to_capture": ((), "Eyas chooses the captured sizes; enforce_eager=True captures none"),
    "block_size": ((None,), "the KV cache has slots of one token"),
    "hf_overrides": ((None, {}), "change config.json in the model's folder"),
    "limit_mm_per_prompt": ((None, {}), "Eyas serves text"),
    "guided_decoding_backend": ((None, "auto"), "set SamplingParams.structured_outputs"),
}
# Arguments of vLLM about its own logs and processes, which change no output.
_WITHOUT_EFFECT = frozenset(
    {"disable_log_stats", "disable_log_requests", "enable_log_requests", "disable_custom_all_reduce", "served_model_name"}
)
_METHODS = {
    "ngram": "prompt_lookup",
    "[ngram]": "prompt_lookup",
    "eagle": "eagle2",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "dflash": "dflash",
    "dspark": "dspark",
    "draft_model": "sps",
    "suffix": "suffix",
    "mtp": MTP,
}
_UNKNOWN_METHODS = frozenset({"mlp_speculator"})
# vLLM also names the modules of each family, such as deepseek_mtp.
_OF_FAMILY = "_mtp"
_SPECULATIVE_HINTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((None, 1), "a drafter has one process; leave it out"),
    "disable_by_batch_size": ((None,), 'leave draft_budget at "auto", which drafts as far as it pays'),
    "speculative_token_tree": ((None,), "set methods=MethodsConfig(eagle1=Eagle1Config(tree_choices=...))"),
    "max_model_len": ((None,), "set max_model_len of LLM"),
    "revision": ((None, "main"), "give the folder of the fetched revision as model"),
    "disable_logprobs": ((None, False, True), ""),
    "disable_padded_drafter_batch": ((None, False, True), ""),
    "rejection_sample_method": ((None,), 'set acceptance="match" or "rejection" of LLM'),
    "draft_sample_method": ((None,), 'set acceptance="match" or "rejection" of LLM'),
}
_SPECULATIVE_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "quantization")


@dataclass(frozen=True)
class Speculation:
    """Choice of drafting.

    Attributes:
        draft_model, method: as of `LLM`; empty if they are not named.
        tree: None keeps the default.
        quantization: as of DraftingConfig.
    """

    draft_model: str = ""
    method: str = ""
    tree: TreeConfig | None = None
    methods: MethodsConfig = field(default_factory=MethodsConfig)
    quantization: DraftQuantization = ""


def engine_config(arguments: Mapping[str, Any], engine: EngineConfig) -> EngineConfig:
    """Return `engine` with the settings that keyword arguments of `LLM` name, in vLLM's or Eyas' spelling.

    None keeps a setting. Raises ConfigError for an argument that Eyas does not have, and for a value out of range.
    """
    own = {item.name for item in fields(EngineConfig)}
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == _STRUCTURED:
            settings |= _whitespace(value)
        elif name in own or name in _RENAMED:
            key, convert = _RENAMED.get(name, (name, lambda same: same))
            settings |= {} if value is None else {key: convert(value)}
        elif name not in _WITHOUT_EFFECT:
            others = "dtype", "device", "tree", "tokenizer", "seed", "threads"
            _refuse(name, value, _REFUSED, "argument", [*own, *_RENAMED, _STRUCTURED, *others])
    try:
        return replace(engine, **settings)
    except TypeError as error:
        raise ConfigError(f"an argument of LLM has the wrong type: {error}") from error


def _whitespace(config: object) -> dict[str, str]:
    """Return the setting that vLLM's structured_outputs_config asks for, if any. Raises ConfigError for no mapping."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{_STRUCTURED} is {config!r}; it must be a mapping such as {{'disable_any_whitespace': True}}")
    return {"json_whitespace_pattern": ""} if config.get("disable_any_whitespace") is True else {}


def speculation(config: Mapping[str, Any], methods: MethodsConfig) -> Speculation:
    """Return what vLLM's `speculative_config` says.

    num_speculative_tokens asks for a chain of that length, as in vLLM; the argument `tree` of LLM gives a tree instead.
    prompt_lookup_max and prompt_lookup_min are the longest and the shortest match. quantization is that of the head. Raises
    ConfigError for other keys.
    """
    for name, value in config.items():
        if name not in _SPECULATIVE_KEYS:
            _refuse(name, value, _SPECULATIVE_HINTS, "key of speculative_config", _SPECULATIVE_KEYS)
    model, method = str(config.get("model") or ""), str(config.get("method") or "")
    if not method and "ngram" in model:
        method = "ngram"
    if method in _UNKNOWN_METHODS:
        raise ConfigError(f"speculative_config has the method {method!r}, which Eyas does not have; see `eyas drafters`")
    method = MTP if method.endswith(_OF_FAMILY) else _METHODS.get(method, method)
    lengths = [int(config[key]) for key in ("prompt_lookup_max", "prompt_lookup_min") if config.get(key)]
    if lengths:
        ngram = replace(methods.prompt_lookup, max_ngram=lengths[0], min_ngram=lengths[-1])
        methods = replace(methods, prompt_lookup=ngram)
    num_tokens, tree = config.get("num_speculative_tokens"), None
    if num_tokens is not None:
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ConfigError(f"num_speculative_tokens is {num_tokens!r}; it must be a whole number, at least 1")
        tree = TreeConfig(num_draft_tokens=num_tokens + 1, num_steps=num_tokens, top_k=1)
    quantization: DraftQuantization = config["quantization"] if config.get("quantization") else ""
    return Speculation("" if model in ("ngram", "[ngram]") else model, method, tree, methods, quantization)


def _refuse(name: str, value: Any, hints: Mapping[str, tuple[tuple[Any, ...], str]], kind: str, known: Any) -> None:
    """Raise ConfigError for a name or a value that Eyas does not have; a value that asks for nothing passes."""
    if name in hints:
        neutral, hint = hints[name]
        if value not in neutral:
            raise ConfigError(f"{name}={value!r} is not supported: {hint}")
        return
    near = difflib.get_close_matches(name, list(known), n=1)
    suffix = f"; did you mean {near[0]}?" if near else "; leave it out"
    raise ConfigError(f"{name} is no {kind} that Eyas knows{suffix}")
