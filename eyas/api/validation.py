"""Checks requests: ranges of their parameters, which SamplingParams checks when made, and whether they fit a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from numbers import Integral
from typing import TYPE_CHECKING, Any

from eyas.errors import InvalidRequest

if TYPE_CHECKING:
    from eyas.api.request import ReasoningBudget, Request, SamplingParams, StructuredOutputs
from eyas.config.checks import WHITESPACE_PATTERN_RULE, is_whitespace_pattern

MAX_SEED = 2**64 - 1
MAX_INT = 2**31 - 1
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_REQUEST_ID_LENGTH = 128
MAX_CACHE_SALT_LENGTH = 256
MAX_COMPLETIONS = 128
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_STRING_LENGTH = 1024
MAX_SESSION_LENGTH = 256
MAX_SCHEMA_LENGTH = 2**17
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_LENGTH = 2**12
MAX_CHOICES = 1024
MAX_CHOICE_LENGTH = 2**12
MAX_ENTRIES: Mapping[str, int] = {
    "stop": 128,
    "stop_token_ids": 1024,
    "logit_bias": 1024,
    "bad_words": MAX_BAD_WORDS,
    "bad_token_ids": MAX_BAD_WORDS,
}

_MAX_CONSTRAINT_LENGTH = {
    "json": MAX_SCHEMA_LENGTH,
    "regex": MAX_REGEX_LENGTH,
    "grammar": MAX_SCHEMA_LENGTH,
    "structural_tag": MAX_SCHEMA_LENGTH,
}
# Draws are uniform long before; the reciprocals of larger numbers vanish in float32.
MAX_TEMPERATURE = 1e6
INT_RANGES = {"max_tokens": (1, MAX_INT), "top_k": (0, MAX_INT), "n": (1, MAX_COMPLETIONS), "min_tokens": (0, MAX_INT)}
OPTIONAL_INT_RANGES = {"seed": (0, MAX_SEED), "logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS)}
# Lowest and highest value, and the range in words.
REAL_RANGES = {
    "min_p": (0.0, 1.0, "lie in [0.0, 1.0]"),
    "repetition_penalty": (0.01, 100.0, "lie in [0.01, 100.0]"),
    "presence_penalty": (-2.0, 2.0, "lie in [-2.0, 2.0]"),
    "frequency_penalty": (-2.0, 2.0, "lie in [-2.0, 2.0]"),
    "temperature": (0.0, MAX_TEMPERATURE, "lie in [0, 1000000]"),
    "top_p": (math.ulp(0.0), 1.0, "lie in (0, 1]"),
    "logit_bias": (-100.0, 100.0, "lie in [-100, 100]"),
}


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest for an id that is too long or not printable: ids name requests in logs."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        reason = f"request_id has {len(request_id)} characters; give at most {MAX_REQUEST_ID_LENGTH}, or none"
        raise InvalidRequest(reason, "request_id")
    if not request_id.isprintable():
        raise InvalidRequest(
            f"request_id {request_id!r} has characters that are not printable; leave them out", "request_id"
        )


def check_cache_salt(salt: str) -> None:
    """Raises InvalidRequest for a salt that is too long."""
    if len(salt) > MAX_CACHE_SALT_LENGTH:
        reason = f"cache_salt has {len(salt)} characters; give at most {MAX_CACHE_SALT_LENGTH}, or none"
        raise InvalidRequest(reason, "cache_salt")


def check_sizes(values: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a sampling parameter that is too large to be converted or checked entry by entry.

    values: parameters of any type, such as those of a message or of parsed JSON; what is no collection passes.
    """
    for name, most in MAX_ENTRIES.items():
        entries = values.get(name, ())
        if isinstance(entries, str):
            entries = (entries,)
        if not isinstance(entries, Sized):
            continue
        if len(entries) > most:
            raise InvalidRequest(f"{name} has {len(entries)} entries; give {most} at most", name)
        if name in ("stop", "bad_words") and isinstance(entries, Iterable):
            longest = max((len(entry) for entry in entries if isinstance(entry, str)), default=0)
            if longest > MAX_STRING_LENGTH:
                raise InvalidRequest(f"{name} has a text of {longest} characters; give {MAX_STRING_LENGTH} at most", name)


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a prompt that leaves no room for a token."""
    if num_tokens >= max_model_len:
        raise InvalidRequest(
            f"prompt of {num_tokens} tokens exceeds the context length {max_model_len}; shorten it", "prompt"
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Raises InvalidRequest naming the first parameter that is out of range, or two that contradict each other.

    The error's `param` is its name. `check_request` checks what depends on the model. Numbers are of Python's own types.
    """
    _check_lists(sampling)
    _check_numbers(sampling)
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens {sampling.min_tokens} is above max_tokens {sampling.max_tokens}; lower it", "min_tokens"
        )
    if sampling.n > 1 and sampling.temperature == 0:
        raise InvalidRequest(f"n is {sampling.n} at temperature 0, where all completions are the same; ask for one", "n")
    if sampling.structured_outputs is not None:
        check_structured_outputs(sampling.structured_outputs)
    if sampling.reasoning_budget is not None:
        _check_reasoning_budget(sampling.reasoning_budget)


def _check_numbers(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for a number out of its range."""
    for name, (low, high) in (INT_RANGES | OPTIONAL_INT_RANGES).items():
        value = getattr(sampling, name)
        if value is None and name in OPTIONAL_INT_RANGES:
            continue
        if type(value) is not int or not low <= value <= high:
            raise InvalidRequest(f"{name} is {value!r}; it must be a whole number from {low} to {high}", name)
    for name, (least, most, words) in REAL_RANGES.items():
        values = [(name, getattr(sampling, name))]
        if name == "logit_bias":
            values = [(f"logit_bias of token {token}", bias) for token, bias in sampling.logit_bias]
        for what, real in values:
            if type(real) not in (int, float) or not least <= real <= most:
                raise InvalidRequest(f"{what} is {real!r}; it must {words}", name)


def _check_lists(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for a list that is too long, or has an empty or repeated entry, or one of the wrong type."""
    for name in ("stop", "bad_words"):
        for text in getattr(sampling, name):
            if not isinstance(text, str):
                raise InvalidRequest(f"{name} holds {text!r}; it must hold texts", name)
            if not text:
                raise InvalidRequest(f"{name} holds an empty string; leave it out", name)
    tokens = {
        "stop_token_ids": sampling.stop_token_ids,
        "bad_token_ids": [token for word in sampling.bad_token_ids for token in word],
        "logit_bias": [token for token, _ in sampling.logit_bias],
    }
    for name, ids in tokens.items():
        if wrong := [token for token in ids if type(token) is not int]:
            raise InvalidRequest(f"{name} holds {wrong[0]!r}; it must hold token ids", name)
    if len(dict(sampling.logit_bias)) < len(sampling.logit_bias):
        raise InvalidRequest("logit_bias names a token twice; add its biases up", "logit_bias")
    if 2 * len(sampling.bad_words) + len(sampling.bad_token_ids) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"more than {MAX_BAD_WORDS} bad_token_ids, where a bad word counts twice; leave some out", "bad_words"
        )
    for word in sampling.bad_token_ids:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"a bad word of {len(word)} tokens; it must have 1 to {MAX_BAD_WORD_TOKENS}", "bad_token_ids"
            )


def _check_reasoning_budget(budget: ReasoningBudget) -> None:
    if not isinstance(budget.num_tokens, Integral) or not 0 <= budget.num_tokens <= MAX_INT:
        reason = f"reasoning_budget is {budget.num_tokens!r} tokens; it must be a whole number from 0 to {MAX_INT}"
        raise InvalidRequest(reason, "reasoning_budget")
    for ids in (budget.start_ids, budget.end_ids):
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS or any(not isinstance(token, Integral) for token in ids):
            reason = f"reasoning_budget has a mark of {len(ids)} entries; it must be 1 to {MAX_BAD_WORD_TOKENS} token ids"
            raise InvalidRequest(reason, "reasoning_budget")


def check_structured_outputs(structured: StructuredOutputs) -> None:
    """Raises InvalidRequest unless exactly one constraint is given, of a size and, for JSON, a syntax that can be compiled.

    Whether a schema, an expression or a grammar compiles is known only to who compiles it.
    """
    given = structured.constraints
    if len(given) != 1:
        found = f"{len(given)} constraints ({', '.join(given)})" if given else "no constraint"
        raise InvalidRequest(
            f"structured_outputs has {found}; give exactly one of {', '.join(CONSTRAINTS)}", "structured_outputs"
        )
    for name, most in _MAX_CONSTRAINT_LENGTH.items():
        text = getattr(structured, name)
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} is {text!r}; it must be text", "structured_outputs")
        if len(text) > most:
            reason = f"{name} has {len(text)} characters; give {most} at most"
            raise InvalidRequest(reason, "structured_outputs")
    if len(structured.choice) > MAX_CHOICES:
        reason = f"choice has more than {MAX_CHOICES} texts; give fewer"
        raise InvalidRequest(reason, "structured_outputs")
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_CHOICE_LENGTH for text in structured.choice):
        reason = f"choice holds what is no text of 1 to {MAX_CHOICE_LENGTH} characters; leave it out"
        raise InvalidRequest(reason, "structured_outputs")
    if sum(map(len, structured.choice)) > MAX_SCHEMA_LENGTH:
        reason = f"choice has more than {MAX_SCHEMA_LENGTH} characters in all; give fewer or shorter texts"
        raise InvalidRequest(reason, "structured_outputs")
    for name in ("json", "structural_tag"):
        if text := getattr(structured, name):
            _check_json(name, text)
    pattern = structured.whitespace_pattern
    if pattern is not None and not is_whitespace_pattern(pattern):
        raise InvalidRequest(f"whitespace_pattern is {str(pattern)[:80]!r}; {WHITESPACE_PATTERN_RULE}", "structured_outputs")


def _check_json(name: str, text: str) -> None:
    """Raises InvalidRequest for text that is no JSON object, or one that is nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", "structured_outputs") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {text[:80]!r}; it must be a JSON object", "structured_outputs")
    level: list[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        children = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        reason = f"{name} is nested more than {MAX_SCHEMA_DEPTH} levels deep; use $ref"
        raise InvalidRequest(reason, "structured_outputs")


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest unless a model with this vocabulary and length can serve the request."""
    num_prompt, sampling = len(request.prompt_ids), request.sampling
    check_cache_salt(request.cache_salt)
    if len(request.session) > MAX_SESSION_LENGTH:
        reason = f"session_id has {len(request.session)} characters; it may have {MAX_SESSION_LENGTH}"
        raise InvalidRequest(reason, "session_id")
    if not 0 <= request.priority <= MAX_INT:
        raise InvalidRequest(f"priority is {request.priority}; it must be 0 (normal) or more, below 2**31", "priority")
    if not 0 <= request.num_draft_tokens <= MAX_INT:
        reason = f"num_draft_tokens is {request.num_draft_tokens}; it must be 0 (the server's limit) or more, below 2**31"
        raise InvalidRequest(reason, "num_draft_tokens")
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
    if not 0 <= request.num_emitted < num_prompt:
        raise InvalidRequest(
            f"{request.num_emitted} of {num_prompt} prompt tokens are said to be output; leave a prompt before"
        )
    if num_prompt + sampling.max_tokens > max_model_len:
        raise InvalidRequest(
            f"prompt of {num_prompt} tokens and max_tokens {sampling.max_tokens} exceed the "
            f"context length {max_model_len}; shorten one of them",
            "prompt" if num_prompt >= max_model_len else "max_tokens",
        )
    named: tuple[tuple[str, Sequence[int]], ...] = (
        ("prompt", request.prompt_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("bad_token_ids", [token for ids in sampling.bad_token_ids for token in ids]),
        ("reasoning_budget", (*budget.end_ids, *budget.start_ids) if (budget := sampling.reasoning_budget) else ()),
    )
    for what, ids in named:
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            outside = next(token for token in ids if not 0 <= token < vocab_size)
            raise InvalidRequest(f"{what} holds token id {outside}, outside the vocabulary [0, {vocab_size})", what)
    if max(sampling.logprobs or 0, sampling.prompt_logprobs or 0) > vocab_size:
        raise InvalidRequest(
            f"more log-probabilities are asked for than the vocabulary has tokens ({vocab_size})", "logprobs"
        )


def check_engine_request(request: Request, vocab_size: int, eos_ids: frozenset[int]) -> None:
    """Raises InvalidRequest for what an engine cannot do, which sees no text and one completion at a time."""
    sampling = request.sampling
    if sampling.seed is None:
        raise InvalidRequest("the request has no seed; SamplingParams.completions() draws one")
    if sampling.n != 1 or sampling.stop or sampling.bad_words:
        raise InvalidRequest(
            "n, stop and bad_words are not for an engine, which sees token ids and one completion; "
            "ask the router or LLM, or split the request with SamplingParams.completions()"
        )
    banned = {ids[-1] for ids in sampling.bad_token_ids}
    if sampling.min_tokens:
        banned |= sampling.end_ids(eos_ids)
    if len(banned) >= vocab_size:
        raise InvalidRequest("bad words, and min_tokens with its stop tokens, may leave no token to draw; ban fewer")
