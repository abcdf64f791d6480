"""Fields of bodies as other servers name them: llama.cpp, Ollama, TGI, vLLM, SGLang, OpenRouter and clients of theirs.

`translated` gives what has a counterpart here its name here. `IGNORED` has the others: they are left out, and logged once.
To add a field, add it to one of the tables; `make chart` writes all but `IGNORED` to docs/http.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.json_values import is_same

# Names here, by names there. Of several names here, the first that the endpoint has; an endpoint without any ignores it.
RENAMED: Mapping[str, tuple[str, ...]] = {
    "ban_eos_token": ("ignore_eos",),
    "ebnf": ("guided_grammar",),
    "extra_key": ("cache_salt",),
    "format": ("guided_json",),
    "grammar": ("guided_grammar",),
    "json_schema": ("guided_json",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_new_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_output_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "max_tokens_to_sample": ("max_output_tokens", "max_tokens"),
    "min_new_tokens": ("min_tokens",),
    "n_predict": ("max_output_tokens", "max_tokens"),
    "no_stop_trim": ("include_stop_str_in_output",),
    "num_predict": ("max_output_tokens", "max_tokens"),
    "num_return_sequences": ("n",),
    "random_seed": ("seed",),
    "reasoning_budget": ("thinking_token_budget",),
    "regex": ("guided_regex",),
    "rep_pen": ("repetition_penalty",),
    "repeat_penalty": ("repetition_penalty",),
    "return_full_text": ("echo",),
    "return_tokens": ("return_token_ids",),
    "rid": ("request_id",),
    "sampler_seed": ("seed",),
    "sampling_seed": ("seed",),
    "stop_sequence": ("stop",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "thinking_budget": ("thinking_token_budget",),
    "until": ("stop",),
}
# Names of several fields here, of a field with other values, or of what is always done; `translated` reads them.
RESHAPED: Mapping[str, str] = {
    "do_sample": "`false` sets `temperature` 0 unless that is given",
    "enable_thinking": "sets variables of the chat template",
    "n_probs": "`logprobs`, and `top_logprobs` of chats",
    "reasoning": "`effort` is `reasoning_effort`, `max_tokens` is `thinking_token_budget`, `exclude` the contrary of "
    "`include_reasoning`, and `enabled` sets variables of the chat template",
    "think": "sets variables of the chat template; a text is `reasoning_effort`",
    "thinking": "in chats `type` sets variables of the chat template, and `budget_tokens` is `thinking_token_budget`",
    "usage": "every answer has its usage; for streams set `stream_options`",
}
# Objects whose fields count as fields of the body, unless the body has them itself.
WRAPPERS = ("extra_body", "options", "parameters", "sampling_params")
# Fields that bound the output, and their values that ask for no bound.
_LIMITS = ("max_tokens", *(name for name, targets in RENAMED.items() if "max_tokens" in targets))
_NO_LIMIT = frozenset({-1, -2})
# Fields of others without a counterpart, at any place of a body.
IGNORED = frozenset(
    {
        # llama.cpp and its front ends
        "backend_sampling", "cache_prompt", "chat_format", "dry_allowed_length", "dry_base", "dry_multiplier",
        "dry_penalty_last_n", "dry_sequence_breakers", "dynamic_temperature", "dynatemp_exponent", "dynatemp_high",
        "dynatemp_low", "dynatemp_range", "epsilon_cutoff", "eta_cutoff", "guidance_scale", "id_slot",
        "max_context_length", "min_keep", "mirostat", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_discard",
        "n_indent", "n_keep", "negative_prompt", "no_repeat_ngram_size", "nsigma", "num_beams", "parse_tool_calls",
        "penalize_nl", "penalty_alpha", "post_sampling_probs", "reasoning_format", "reasoning_in_content",
        "rep_pen_range", "rep_pen_slope", "repeat_last_n", "response_fields", "return_progress", "sampler_order",
        "sampler_priority", "samplers", "slot_id", "smoothing_curve", "smoothing_factor", "t_max_predict_ms",
        "t_max_prompt_ms", "temperature_last", "tfs", "tfs_z", "thinking_forced_open", "timings_per_token", "top_a",
        "top_n_sigma", "trim_stop", "truncation_length", "typ_p", "typical", "typical_p", "use_default_badwordsids",
        "xtc_probability", "xtc_threshold",
        # Ollama and LM Studio
        "draft_model", "f16_kv", "keep_alive", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_gqa",
        "num_keep", "num_thread", "numa", "penalize_newline", "ttl", "use_mlock", "use_mmap", "vocab_only",
        # TGI, vLLM and SGLang
        "backend", "bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_params", "data_parallel_rank",
        "decoder_input_details", "details", "detokenize", "guided_decoding_backend", "guideline", "logprob_start_len",
        "return_cached_tokens_details", "return_hidden_states", "return_logprob", "return_routed_experts",
        "return_text_in_logprobs", "routed_dp_rank", "separate_reasoning", "stream_reasoning", "text_token_ids_logprob",
        "token_ids_logprob", "tool_prompt", "top_k_return_sequences", "top_logprobs_num", "top_n_tokens",
        "typical_prob", "watermark",
        # OpenRouter, gateways, client libraries and other providers
        "allowed_openai_params", "api_base", "api_key", "api_version", "cache", "compliance",
        "context_length_exceeded_behavior", "custom_llm_provider", "debug", "document_image_limit", "drop_params",
        "enable_search", "extra_headers", "extra_query", "fallbacks", "input_cost_per_token", "litellm_metadata",
        "mock_response", "model_info", "models", "num_retries", "output_cost_per_token", "perf_metrics_in_response",
        "plugins", "preset", "prompt_mode", "prompt_truncate_len", "provider", "raw_output", "reasoning_history",
        "route", "safe_prompt", "safety_model", "search_parameters", "speculation", "tags", "timeout", "trace",
        "transforms", "translate",
        # of messages and their parts, often from earlier answers
        "cache_control", "created_at", "finish_reason", "native_finish_reason", "parsed", "parsed_arguments",
        "provider_specific_fields", "reasoning_details", "stop_reason", "thinking_blocks", "timestamp", "token_ids",
        "weight",
    }
)  # fmt: skip


def translated(data: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a body with the names that its endpoint has. known: these names.

    Raises InvalidRequest for two names of one field with different values, and for values that have no meaning here.
    """
    body = {name: value for name, value in data.items() if value is not None}
    for name in [one for one in WRAPPERS if one not in known]:
        if isinstance(inner := body.get(name), Mapping):
            del body[name]
            body = {key: value for key, value in inner.items() if value is not None} | body
    _drop_limits(body)
    if _flag("do_sample", body.pop("do_sample", True)) is False:
        body.setdefault("temperature", 0.0)
    for name in [name for name in body if name in RESHAPED and name not in known]:
        for target, value in _READERS[name](body.pop(name), known):
            if target in known:
                _set(body, name, target, value)
    for name in [name for name in body if name in RENAMED and name not in known]:
        value = body.pop(name)
        if target := next((one for one in RENAMED[name] if one in known), ""):
            _rename(body, name, target, value)
    return body


def _drop_limits(body: dict[str, Any]) -> None:
    """Drop limits that ask for none. Raises InvalidRequest for those of a prompt, whose outputs have a limit by default."""
    for name in [name for name in _LIMITS if isinstance(body.get(name), int) and body[name] in _NO_LIMIT]:
        if "prompt" in body:
            raise InvalidRequest(f"{name} is {body[name]}, which sets no limit; give a number of tokens", name)
        del body[name]


def _rename(body: dict[str, Any], name: str, target: str, value: Any) -> None:
    if target.startswith("guided_") and value == "":  # no constraint, there
        return
    if name == "format" and value == "json":
        target, value = "guided_json_object", True
    _set(body, name, target, value)


def _set(body: dict[str, Any], name: str, target: str, value: Any) -> None:
    """Set a field, or add to the variables of the chat template. name: where its value comes from."""
    if target == "chat_template_kwargs":
        variables = body.get(target, {})
        body[target] = {**value, **variables} if isinstance(variables, Mapping) else variables
    elif target in body and not is_same(body[target], value):
        raise InvalidRequest(f"{name} and {target} say different things; give one of them", name)
    else:
        body[target] = value


Settings = Iterator[tuple[str, Any]]


def _thinks(name: str, value: Any) -> Settings:
    is_on = _flag(name, value)
    yield "chat_template_kwargs", {"enable_thinking": is_on, "thinking": is_on}


def _of_n_probs(value: Any, known: Collection[str]) -> Settings:
    if value and "top_logprobs" in known:
        yield from (("logprobs", True), ("top_logprobs", value))
    elif value and "logprobs" in known:
        yield "logprobs", value


def _of_reasoning(value: Any, known: Collection[str]) -> Settings:
    """Return OpenRouter's settings of the reasoning."""
    settings = _object("reasoning", value)
    for key, target in (("effort", "reasoning_effort"), ("max_tokens", "thinking_token_budget")):
        if settings.get(key) is not None:
            yield target, settings[key]
    if settings.get("exclude") is not None and _flag("reasoning.exclude", settings["exclude"]):
        yield "include_reasoning", False
    if settings.get("enabled") is not None:
        yield from _thinks("reasoning.enabled", settings["enabled"])


def _of_think(value: Any, known: Collection[str]) -> Settings:
    if isinstance(value, str) and "reasoning_effort" in known:
        yield "reasoning_effort", value
    else:
        yield from _thinks("think", value)


def _of_thinking(value: Any, known: Collection[str]) -> Settings:
    """Return DeepSeek's and Anthropic's settings of the reasoning, in a chat."""
    settings = _object("thinking", value)
    if settings.get("type") not in ("enabled", "disabled", "adaptive", "auto"):
        raise InvalidRequest('thinking must have the type "enabled", "disabled", "adaptive" or "auto"', "thinking")
    if settings.get("budget_tokens") is not None:
        yield "thinking_token_budget", settings["budget_tokens"]
    yield from _thinks("thinking", settings["type"] != "disabled")


_READERS: Mapping[str, Callable[[Any, Collection[str]], Settings]] = {
    "enable_thinking": lambda value, known: _thinks("enable_thinking", value),
    "n_probs": _of_n_probs,
    "reasoning": _of_reasoning,
    "think": _of_think,
    "thinking": _of_thinking,
    "usage": lambda value, known: iter(()),
}


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {str(value)[:80]!r}; it must be true or false", name.partition(".")[0])
    return value


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is {str(value)[:80]!r}; it must be an object", name)
    return value


# Names that are nearly right


def near_names(name: str, known: frozenset[str]) -> list[str]:
    """Return the known names that a name was probably meant to be, in order: one letter is wrong, missing or too many,
    two are swapped, or the words are written together or in capitals. Linear in the length of the name, for any number of
    known ones.
    """
    if len(name) > _LONGEST:
        return []
    plain, spellings = _plain(name), _spellings(known)
    return sorted({one for key in _shortened(plain) for one in spellings.get(key, ())})


# Longest name that is compared, and shortest one in which a letter may be wrong.
_LONGEST, _SHORTEST = 64, 5


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _shortened(plain: str) -> Iterable[str]:
    """Return a name, and what is left of it without one of its letters, for names that are long enough."""
    yield plain
    if len(plain) >= _SHORTEST:
        yield from (plain[:at] + plain[at + 1 :] for at in range(len(plain)))


@cache
def _spellings(known: frozenset[str]) -> Mapping[str, frozenset[str]]:
    """Return the known names by what is left of them."""
    found: dict[str, set[str]] = {}
    for name in known:
        for key in _shortened(_plain(name)):
            found.setdefault(key, set()).add(name)
    return {key: frozenset(names) for key, names in found.items()}
