"""Log-probabilities of the target's own distribution: of emitted tokens and of the prompt, however the tokens came about."""

from dataclasses import replace

import pytest
import torch

from eyas.api.request import Chunk, Request, SamplingParams, TokenLogprob
from tests.engine.test_equality import make_drafter, make_engine, prompts
from tests.support import reference
from tests.support.bad_drafters import KnowingDrafter
from tests.support.runs import run, tokens_of

ASKED = SamplingParams(max_tokens=14, temperature=0.8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
KINDS = (
    ASKED,
    replace(ASKED, logprobs=None),
    replace(ASKED, logprobs=0, prompt_logprobs=None, repetition_penalty=1.4, logit_bias=((9, 4.0),), top_k=5),
    replace(ASKED, logprobs=None, prompt_logprobs=None),
    replace(ASKED, logprobs=5, prompt_logprobs=0, temperature=0),
    replace(ASKED, ignore_eos=False, stop_token_ids=tuple(range(20))),
)


@torch.inference_mode()
def expected(target: str, tokens: list[int], first: int, num_top: int) -> list[TokenLogprob]:
    """Expected log-probabilities of tokens[first:], by one pass over all tokens."""
    log_probs = torch.log_softmax(reference.forward(target, tokens), -1)
    reported = []
    for at in range(max(first, 1), len(tokens)):
        row = log_probs[at - 1]
        top = row.topk(num_top)
        reported.append(
            TokenLogprob(tokens[at], float(row[tokens[at]]), tuple(top.indices.tolist()), tuple(top.values.tolist()))
        )
    return reported


def assert_close(got: list[TokenLogprob], wanted: list[TokenLogprob]) -> None:
    assert [(reported.token, reported.top_ids) for reported in got] == [
        (reported.token, reported.top_ids) for reported in wanted
    ]
    for one, other in zip(got, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def requests() -> list[Request]:
    return [
        Request(f"r{i}", tuple(prompt), replace(KINDS[i % len(KINDS)], seed=i))
        for i, prompt in enumerate([*prompts(6, seed=6), [7]])
    ]


@pytest.mark.parametrize("name", ["none", "random", "eagle3", "knowing"])
def test_prompt_logprobs_equal_one_pass_over_everything(name: str, tiny_target: str, tiny_head: str) -> None:
    """Prompts of up to 40 tokens are prefilled 16 at a time."""
    asked = requests()
    outputs = {r.id: reference.generate(tiny_target, list(r.prompt_ids), r.sampling) for r in asked}
    outcomes = {r.id: [*r.prompt_ids, *outputs[r.id]] for r in asked}
    drafter = KnowingDrafter(outcomes, 48) if name == "knowing" else make_drafter(name, tiny_target, tiny_head)
    chunks = run(make_engine(drafter, tiny_target, tiny_head), asked[:3], {4: asked[3:]})
    for request in asked:
        part, num_prompt, sampling = chunks[request.id], len(request.prompt_ids), request.sampling
        assert tokens_of(part) == outputs[request.id]
        check_output(tiny_target, part, outcomes[request.id], num_prompt, sampling)
        check_prompt(tiny_target, part, list(request.prompt_ids), sampling)


def check_output(target: str, chunks: list[Chunk], tokens: list[int], num_prompt: int, sampling: SamplingParams) -> None:
    reported = [entry for chunk in chunks for entry in chunk.logprobs]
    if sampling.logprobs is None:
        assert reported == []
        return
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert_close(reported, expected(target, tokens, num_prompt, sampling.logprobs))


def check_prompt(target: str, chunks: list[Chunk], prompt: list[int], sampling: SamplingParams) -> None:
    assert not any(chunk.prompt_logprobs for chunk in chunks[1:])
    if sampling.prompt_logprobs is None:
        assert chunks[0].prompt_logprobs == ()
        return
    first, *rest = chunks[0].prompt_logprobs
    assert first == TokenLogprob(prompt[0], None)
    assert_close(rest, expected(target, prompt, 0, sampling.prompt_logprobs))
