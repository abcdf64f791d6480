"""Straightforward versions of the same computations: plain Python integers, full forward passes, one token at a time."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from eyas.api.request import SamplingParams
from eyas.protocol.commit import NoiseKey

MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def noise(seed: int, position: int, token: int) -> float:
    """The exponential noise of one (seed, position, token), in unbounded integers and doubles."""
    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) & MASK) + position * golden) & MASK)
    bits = mix((key + (token + 1) * golden) & MASK) >> 12
    return -math.log1p(-(bits + 0.5) / 2**52)


def steered(
    logits: torch.Tensor, tokens: list[int], num_prompt: int, params: SamplingParams, eos: frozenset[int] = frozenset({1})
) -> torch.Tensor:
    """Bias, penalties and bans over one row, token by token; `tokens` are prompt and output so far."""
    logits, output = logits.clone(), tokens[num_prompt:]
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set(tokens) if params.repetition_penalty != 1 else ():
        weaken = logits[token] > 0
        logits[token] = logits[token] / params.repetition_penalty if weaken else logits[token] * params.repetition_penalty
    for token in set(output) if params.frequency_penalty or params.presence_penalty else ():
        logits[token] = logits[token] - params.frequency_penalty * output.count(token) - params.presence_penalty
    for word in params.bad_token_ids:
        if tokens[len(tokens) - len(word) + 1 :] == list(word[:-1]) and len(tokens) >= len(word) - 1:
            logits[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            logits[token] = -math.inf
    if (forced := forced_end(output, params)) is not None:
        logits[:] = -math.inf
        logits[forced] = 0
    return logits


def forced_end(output: list[int], params: SamplingParams) -> int | None:
    """The token that goes on with the end of a reasoning whose budget is used up. Looks through the whole output."""
    if (budget := params.reasoning_budget) is None:
        return None
    is_open, begun, num_tokens = budget.is_open, 0, 0
    for at in range(1, len(output) + 1):
        mark = list(budget.end_ids if is_open else budget.start_ids)
        if output[begun:at][-len(mark) :] == mark:
            is_open, begun = not is_open, at
        else:
            num_tokens += is_open
    if not is_open or num_tokens < budget.num_tokens:
        return None
    inside, ends = output[begun:], list(budget.end_ids)
    matched = max(n for n in range(len(ends)) if inside[len(inside) - n :] == ends[:n] and n <= len(inside))
    return ends[matched]


def target_probs(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Temperature, then top-k, then top-p, then min-p over one row; unnormalised."""
    probs = torch.softmax(logits.float() / params.temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = order[: params.top_k] if params.top_k else order
    total, reached, nucleus = sum(probs[t] for t in kept), 0.0, []
    for token in kept:
        if reached >= params.top_p * total:
            break
        nucleus.append(token)
        reached += probs[token]
    least = params.min_p * max(probs)
    chosen = {token for token in nucleus if probs[token] >= least}
    return [prob if token in chosen else 0.0 for token, prob in enumerate(probs)]


def draft_scores(
    logits: torch.Tensor, key: NoiseKey, position: int, ids: Sequence[int], ranking_temperature: float = 1.0
) -> list[float]:
    """Log-scores of a drafter's logits under the noise of the target's draw. ids: of its vocabulary, the target's."""
    if key.temperature == 0:
        return torch.log_softmax(logits / ranking_temperature, -1).tolist()
    probs = target_probs(logits, SamplingParams(temperature=key.temperature, top_k=key.top_k, top_p=key.top_p))
    scores = [
        (logit - key.temperature * math.log(noise(key.seed, position, token))) / ranking_temperature if p > 0 else -math.inf
        for logit, p, token in zip(logits.tolist(), probs, ids, strict=True)
    ]
    return torch.log_softmax(torch.tensor(scores), -1).tolist()


def draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """One token by the exponential race; ties to the lowest id."""
    if params.temperature == 0:
        return int(max(range(len(logits)), key=lambda token: (float(logits[token]), -token)))
    assert params.seed is not None
    probs = target_probs(logits, params)
    times = [noise(params.seed, position, t) / p if p > 0 else math.inf for t, p in enumerate(probs)]
    return min(range(len(times)), key=lambda token: (times[token], token))


@functools.cache
def load_reference(path: str) -> torch.nn.Module:
    """transformers' own model with its own attention."""
    auto = whole_class(AutoConfig.from_pretrained(path))
    model: torch.nn.Module = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def whole_class(config: Any) -> Any:
    """The Auto class of a whole model, images and sound included."""
    images: Any = AutoModelForImageTextToText
    return images if type(config) in images._model_mapping else AutoModelForCausalLM


def forward(path: str, tokens: list[int]) -> torch.Tensor:
    """Logits after each token, [n, V]."""
    logits: torch.Tensor = load_reference(path)(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


Allowed = Callable[[list[int]], list[int]]


def generate(
    path: str,
    prompt: list[int],
    params: SamplingParams,
    eos: frozenset[int] = frozenset({1}),
    allowed: Allowed | None = None,
) -> list[int]:
    """A loop over transformers' forward that recomputes everything for every token. Many tests ask for the same results.

    allowed: the tokens that may follow an output.
    """
    return list(_generate(path, tuple(prompt), params, eos, allowed))


@functools.cache
@torch.inference_mode()
def _generate(
    path: str, prompt: tuple[int, ...], params: SamplingParams, eos: frozenset[int], allowed: Allowed | None
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        logits = forward(path, tokens)[-1].clone()
        if allowed is not None:
            logits[sorted({*range(len(logits))} - {*allowed(tokens[len(prompt) :])})] = -math.inf
        tokens.append(draw(steered(logits, tokens, len(prompt), params, eos), params, len(tokens)))
        if tokens[-1] in params.stop_token_ids or (tokens[-1] in eos and not params.ignore_eos):
            break
    return tokens[len(prompt) :]


@functools.cache
def generated(folder: str, prompt: tuple[int, ...]) -> list[int]:
    """Twelve tokens at most that transformers' own `generate` gives, greedily."""
    reference: Any = load_reference(folder)
    found = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0]
    return list(found[len(prompt) :].tolist())
