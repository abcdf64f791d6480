"""Everything a request can ask, through LLM: several completions, bad words, log-probabilities."""

from dataclasses import replace

import pytest

from eyas import LLM, SamplingParams

PROMPT = "import os\n\ndef main("
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, seed=5)


def test_n_completions_are_n_requests_with_derived_seeds(plain_llm: LLM, eagle3_llm: LLM) -> None:
    (together,) = eagle3_llm.generate(PROMPT, replace(SAMPLED, n=3))
    assert [c.index for c in together.outputs] == [0, 1, 2]
    assert [c.seed for c in together.outputs] == [split.seed for split in replace(SAMPLED, n=3).completions()]
    assert len({tuple(c.token_ids) for c in together.outputs}) == 3
    for one in together.outputs:
        (alone,) = plain_llm.generate(PROMPT, replace(SAMPLED, seed=one.seed))[0].outputs
        assert (one.token_ids, one.text, one.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)


def test_bad_words_do_not_come_out(plain_llm: LLM, eagle3_llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0)
    (free,) = plain_llm.generate(PROMPT, greedy)[0].outputs
    word = next(word for word in free.text.split() if len(word) > 2)
    llms = (plain_llm, eagle3_llm)
    steered = [llm.generate(PROMPT, replace(greedy, bad_words=(word,)))[0].outputs[0] for llm in llms]
    assert steered[0].token_ids == steered[1].token_ids != free.token_ids
    assert word in free.text
    assert word not in steered[0].text


def test_logprobs_cover_the_tokens_before_a_stop_string(eagle3_llm: LLM) -> None:
    asked = SamplingParams(max_tokens=24, temperature=0, logprobs=2, prompt_logprobs=1)
    (result,) = eagle3_llm.generate(PROMPT, asked)
    (whole,), prompt_logprobs = result.outputs, result.prompt_logprobs
    assert whole.logprobs is not None
    assert [next(iter(reported)) for reported in whole.logprobs] == whole.token_ids
    assert all(len(reported) == 2 for reported in whole.logprobs)
    ranks = [reported[token].rank for reported, token in zip(whole.logprobs, whole.token_ids, strict=True)]
    assert ranks == [1] * len(whole.token_ids), "greedy takes the likeliest"
    sampled = [reported[token] for reported, token in zip(whole.logprobs, whole.token_ids, strict=True)]
    assert whole.cumulative_logprob == pytest.approx(sum(one.logprob for one in sampled))
    assert "".join(str(one.decoded_token) for one in sampled) == whole.text
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    assert [next(iter(reported)) for reported in prompt_logprobs[1:] if reported] == result.prompt_token_ids[1:]
    (cut,) = eagle3_llm.generate(PROMPT, replace(asked, stop=(whole.text[8:13],)))[0].outputs
    assert cut.logprobs is not None
    assert [next(iter(reported)) for reported in cut.logprobs] == cut.token_ids
    assert len(cut.logprobs) < len(whole.logprobs)


def test_a_stop_string_is_not_looked_for_before_min_tokens(plain_llm: LLM, eagle3_llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0)
    (whole,) = plain_llm.generate(PROMPT, greedy)[0].outputs
    stop = (whole.text[0],)
    for llm in (plain_llm, eagle3_llm):
        assert llm.generate(PROMPT, replace(greedy, stop=stop))[0].outputs[0].text == ""
        (later,) = llm.generate(PROMPT, replace(greedy, stop=stop, min_tokens=5))[0].outputs
        assert later.token_ids == whole.token_ids[: len(later.token_ids)]
        assert len(later.token_ids) > 5 or whole.text.count(stop[0]) == 1
