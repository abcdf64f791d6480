"""Values that a request consists of and is answered with: plain values that every package shares."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence, Sized
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import zip_longest
from numbers import Integral, Real
from typing import Any, Literal, cast

from eyas.api.validation import CONSTRAINTS, check_sampling, check_sizes
from eyas.errors import InvalidRequest
from eyas.protocol.commit import NoiseKey

# Sampling parameters for which a model may have defaults of its own.
DEFAULTED = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
FinishReason = Literal["stop", "length", "cancelled", "error"]

# Text, token ids, or vLLM's dictionary of `prompt` and `prompt_token_ids`.
Prompt = str | Sequence[int] | Mapping[str, Any]

COMPLETION_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint that the text of the output must match; exactly one is set. docs/structured-outputs.md has the exact
    rules.

    Attributes:
        json: a JSON schema as text, or as a mapping, which becomes text.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these texts.
        grammar: a context-free grammar in EBNF, as of llama.cpp (GBNF), with the rule `root`.
        structural_tag: parts of the output that follow a schema, as xgrammar's structural tag in JSON; also a mapping.
        whitespace_pattern: a regular expression of the whitespace between JSON's parts, empty for none; None takes the
            engine's.
        disable_any_whitespace: vLLM's word for an empty whitespace_pattern.
    """

    json: str = ""
    json_object: bool = False
    regex: str = ""
    choice: tuple[str, ...] = ()
    grammar: str = ""
    structural_tag: str = ""
    whitespace_pattern: str | None = None
    disable_any_whitespace: InitVar[bool] = False

    def __post_init__(self, disable_any_whitespace: bool) -> None:
        if disable_any_whitespace:
            if self.whitespace_pattern:
                reason = "disable_any_whitespace and whitespace_pattern contradict each other; give one of them"
                raise InvalidRequest(reason, "structured_outputs")
            object.__setattr__(self, "whitespace_pattern", "")
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), Mapping):
                try:
                    object.__setattr__(self, name, json.dumps(value))
                except (RecursionError, TypeError, ValueError) as error:
                    raise InvalidRequest(f"{name} is no JSON: {error}", "structured_outputs") from error
        object.__setattr__(self, "choice", (self.choice,) if isinstance(self.choice, str) else tuple(self.choice))

    @property
    def constraints(self) -> tuple[str, ...]:
        """Names of the constraints that are given; check_sampling accepts exactly one."""
        return tuple(name for name in CONSTRAINTS if getattr(self, name))


@dataclass(frozen=True)
class ReasoningBudget:
    """Most tokens of reasoning in an output. What is drawn after them is the end of the reasoning.

    Attributes:
        num_tokens: tokens between the marks, at least 0.
        end_ids: tokens in a row that end the reasoning.
        start_ids: tokens in a row that begin it.
        is_open: the prompt has begun it.
    """

    num_tokens: int
    end_ids: tuple[int, ...]
    start_ids: tuple[int, ...]
    is_open: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """Settings for drawing tokens; docs/sampling.md has the exact rules and their order. Names as in vLLM.

    Raises InvalidRequest when it is made with a value out of range; lists may be None, and `stop` and `bad_words` one text.

    max_tokens: most tokens to emit, at least 1.
    temperature: 0 is greedy; above 0 scales the logits by 1/temperature.
    top_k: keep the k likeliest tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, in (0, 1].
    seed: 0 to 2**64-1; None draws one. The same seed gives the same tokens, with or without a drafter
        (under the acceptance rule `rejection`, above temperature 0, with the same drafts only).
    stop: strings that end the text; the text is cut before them, tokens are kept up to the one that completes them.
    stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens; kept in token_ids.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    n: completions of the prompt; completion i draws with seed + i * COMPLETION_SEED_STEP, modulo 2**64.
    min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
    min_tokens: number of tokens before which no token that ends the output is drawn and stop strings do not count.
    logit_bias: (token id, bias in [-100, 100]) pairs, or a mapping; added to the token's logit.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 does nothing.
    presence_penalty: taken from the logit of every token in the output, in [-2, 2].
    frequency_penalty: taken from a token's logit once for each time that it is in the output, in [-2, 2].
    bad_words: texts that must not occur, each as given and after a space; a token that would complete one is not drawn.
    bad_token_ids: the same as token ids: sequences that must not be completed, even if the prompt began one.
    logprobs: report each emitted token's log-probability and this number of likeliest tokens, 0 to 20; None reports none.
    prompt_logprobs: the same for every token of the prompt.
    structured_outputs: what the text of the output must match; None leaves it free.
    reasoning_budget: how long the reasoning may be; None sets no limit.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_budget: ReasoningBudget | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids", "bad_token_ids", "logit_bias"):
            value: Any = getattr(self, name)
            try:
                object.__setattr__(self, name, _normalised(name, value))
            except TypeError:
                raise InvalidRequest(f"{name} is {value!r}; it must be a list, or a mapping for logit_bias", name) from None
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        check_sizes(vars(self))
        for name, value in tuple(vars(self).items()):
            object.__setattr__(self, name, _plain(value))
        check_sampling(self)

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the output; eos_ids: the model's own, which are ignored only where something else may
        follow.
        """
        is_ignored = self.ignore_eos and self.structured_outputs is None
        return frozenset(self.stop_token_ids) | (frozenset() if is_ignored else eos_ids)

    @property
    def has_logit_rules(self) -> bool:
        """Return whether biases, penalties, bans or a budget change logits before a draw, see eyas.sampling.logit_rules."""
        is_biased = bool(self.logit_bias or self.bad_token_ids or self.min_tokens)
        return is_biased or self.reasoning_budget is not None or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        """Return whether tokens that have occurred are penalised."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def completions(self, bad_token_ids: Iterable[tuple[int, ...]] = ()) -> tuple[SamplingParams, ...]:
        """Return the parameters of each of the n completions, as an engine takes them, with seeds.

        bad_token_ids: `bad_words` as token ids. The caller looks for stop strings. Only the first has prompt_logprobs.
        """
        seed = secrets.randbits(64) if self.seed is None else self.seed
        words, first = tuple(bad_token_ids), self
        if words:
            first = replace(self, bad_words=(), bad_token_ids=(*self.bad_token_ids, *words))
        completions = []
        for i in range(self.n):
            one = copy(first)  # these values need no check
            vars(one).update(n=1, stop=(), bad_words=(), seed=(seed + i * COMPLETION_SEED_STEP) % 2**64)
            vars(one).update({"prompt_logprobs": None} if i else {})
            completions.append(one)
        return tuple(completions)


def paired(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams | None = None,
) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt, of one or several, with its parameters; `default` without any.

    Raises InvalidRequest for a wrong number or type.
    """
    if not isinstance(prompts, Sized):
        raise InvalidRequest(f"prompts is {prompts!r}; give a prompt, or a list of them")
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) and all(isinstance(one, Integral) for one in prompts))
    batch = [cast("Prompt", prompts)] if is_one else list(cast("Sequence[Prompt]", prompts))
    params = sampling_params or default or SamplingParams()
    each = list(params) if isinstance(params, Sequence) else [params] * len(batch)
    if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
        raise InvalidRequest(f"sampling_params holds {wrong[0]!r}; give SamplingParams")
    if len(each) != len(batch):
        raise InvalidRequest(f"{len(batch)} prompts but {len(each)} sampling params; give one for all, or one each")
    return list(zip(batch, each, strict=True))


def split_prompt(prompt: Prompt) -> tuple[str | None, tuple[int, ...] | None]:
    """Return the text of a prompt and its token ids, None for what it lacks. Raises InvalidRequest."""
    text: Any = prompt
    ids: Any = None
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is None and not isinstance(text, str):
        text, ids = None, text
    if ids is None and text is None:
        raise InvalidRequest(f"{prompt!r} is no prompt; give text, token ids, or one of them as prompt or prompt_token_ids")
    if ids is None:
        return text, None
    for token in ids:
        if not isinstance(token, Integral):
            raise InvalidRequest(f"{token!r} is not a token id; a prompt is text or a list of whole numbers")
    return text, tuple(map(int, ids))


def _normalised(name: str, value: Any) -> tuple[Any, ...]:
    """Return a list of a parameter as a tuple; one text counts as a list of one, None as an empty one. Raises TypeError."""
    if isinstance(value, str):
        return (value,) if name in ("stop", "bad_words") else tuple(value)
    entries = value.items() if isinstance(value, Mapping) else () if value is None else value
    if name == "logit_bias":
        return tuple(sorted(tuple(pair) for pair in entries))
    return tuple(map(tuple, entries)) if name == "bad_token_ids" else tuple(entries)


def _plain(value: Any) -> Any:
    """Return numbers of other types, such as numpy's, as Python's own, which messages take."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass(frozen=True)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        session: groups the requests of one conversation, whose slots are kept warm between its turns.
        priority: 0 is normal, higher is more urgent; within a priority the first comes first.
        num_emitted: how many tokens at the end of prompt_ids are output of this request from before it moved here.
        tenant: opaque id of whom the request belongs to; tenants share an engine fairly. The router sets it from the API
            key.
        cache_salt: only requests with an equal salt share cached prefixes.
        num_draft_tokens: most nodes of its draft trees, the root included; 0 sets no limit of its own, 1 asks for no
            drafts.
        return_verify_steps: whether its chunks have `VerifyStep.details`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    session: str = ""
    priority: int = 0
    num_emitted: int = 0
    tenant: str = ""
    cache_salt: str = ""
    num_draft_tokens: int = 0
    return_verify_steps: bool = False

    @cached_property
    def tenant_key(self) -> str:
        """Digest of tenant and salt: requests with equal ones may be drafted each other's outputs."""
        return blake2b(f"{self.tenant}\0{self.cache_salt}".encode(), digest_size=16).hexdigest()

    @cached_property
    def noise_key(self) -> NoiseKey:
        """Return what the request's draws depend on. Its seed must have been fixed."""
        sampling = self.sampling
        assert sampling.seed is not None, "a request enters the engine with a seed"
        return NoiseKey(sampling.seed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    @cached_property
    def wants_tokens_alone(self) -> bool:
        """Return whether it needs nothing of a step but draws at nodes of its tree, from the logits as they are."""
        sampling = self.sampling
        return sampling.logprobs is None and sampling.structured_outputs is None and not sampling.has_logit_rules


@dataclass(frozen=True)
class VerifyStepDetails:
    """The draft tree and the times of a verify step. Times are in ms, and 0 where they are not known.

    Attributes:
        tokens, parents, log_probs: of each node, see eyas.protocol.tree.DraftTree; node 0 is the root.
        path: accepted nodes from the root down, without the root.
        sources: for a combined method, see DraftTree; empty for others.
        method: of the drafter, such as "eagle3"; empty without a drafter.
        draft_ms: time that the drafter worked.
        round_trip_ms: from the request for the tree to its arrival, draft_ms included.
        wait_ms: time that the verifier waited for trees.
        verify_ms: from there to the accepted tokens, of all sequences.
        num_rows: rows of the forward pass, of all sequences.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    path: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    method: str = ""
    draft_ms: float = 0.0
    round_trip_ms: float = 0.0
    wait_ms: float = 0.0
    verify_ms: float = 0.0
    num_rows: int = 0


@dataclass(frozen=True)
class VerifyStep:
    """One verify step of one sequence, in numbers. `accepted` are drafted tokens, the bonus token not counted.

    details: None unless the request has `return_verify_steps`.
    """

    drafted: int
    depth: int
    accepted: int
    grown_ahead: bool = False
    details: VerifyStepDetails | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A token under the target's own distribution, before penalties, temperature and filters.

    Attributes:
        logprob: None for the first token of a prompt.
        top_ids, top_logprobs: the likeliest tokens there, best first.
    """

    token: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """Tokens that one step adds to a request.

    verify_step is None for a step that ends a prefill. message explains the finish reason "error";

    Attributes:
        is_draft_token[i]: whether the drafter guessed token_ids[i].
        is_invalid: whether the request itself is the reason, so that no other engine could serve it.
        index: which of the n completions.
        logprobs: one per token where asked for.
        prompt_logprobs: one per token of the prompt where asked for, on the first chunk only.
        num_cached: prompt tokens that came from the prefix cache; on a request's first tokens only.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    is_draft_token: tuple[bool, ...] = ()
    verify_step: VerifyStep | None = None
    finish_reason: FinishReason | None = None
    message: str = ""
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached: int = 0
    is_invalid: bool = False

    @property
    def num_bytes(self) -> int:
        """The memory that the chunk takes, estimated."""
        num_bytes = 1024 + 48 * len(self.token_ids)
        if self.verify_step and self.verify_step.details:
            num_bytes += 160 * len(self.verify_step.details.tokens)
        if self.logprobs or self.prompt_logprobs:
            num_bytes += sum(192 + 72 * len(entry.top_ids) for entry in (*self.logprobs, *self.prompt_logprobs))
        return num_bytes

    def first(self, num_tokens: int) -> Chunk:
        """Return the chunk with its first `num_tokens` tokens only."""
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            is_draft_token=self.is_draft_token[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
        )


@dataclass
class GenerationStats:
    """Speculation in numbers, summed over verify steps. Accepted tokens after a stop or the length limit do not count."""

    num_verify_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Count one chunk; the prefill's own token belongs to no verify step."""
        if (step := chunk.verify_step) is not None:
            accepted = sum(chunk.is_draft_token)
            self.merge(GenerationStats(1, step.drafted, accepted, len(chunk.token_ids), [1] * step.depth, [1] * accepted))

    def merge(self, other: GenerationStats) -> None:
        """Add another request's counts."""
        self.num_verify_steps += other.num_verify_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_emitted += other.num_emitted
        offered = zip_longest(self.offered_by_depth, other.offered_by_depth, fillvalue=0)
        accepted = zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        self.offered_by_depth, self.accepted_by_depth = list(map(sum, offered)), list(map(sum, accepted))

    @property
    def acceptance_length(self) -> float:
        """tau: mean tokens per verify step, bonus included; 1.0 without a drafter, 0.0 without a verify step."""
        return self.num_emitted / self.num_verify_steps if self.num_verify_steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Return, for each depth d from 1, the share of verify steps with trees that deep that accepted d tokens or more."""
        accepted = self.accepted_by_depth + [0] * len(self.offered_by_depth)
        return [a / o for o, a in zip(self.offered_by_depth, accepted, strict=False)]
