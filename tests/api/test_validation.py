"""What cannot be done is refused with a reason, never ignored."""

from dataclasses import replace

import numpy as np
import pytest

from eyas.api.request import Request, SamplingParams, StructuredOutputs
from eyas.api.validation import check_engine_request, check_request
from eyas.errors import InvalidRequest

FINE = SamplingParams(
    max_tokens=8, temperature=0.7, top_k=5, top_p=0.9, seed=3, stop_token_ids=(4,), min_p=0.1, min_tokens=8,
    logit_bias={7: -100, 5: 100.0}, repetition_penalty=1.2, presence_penalty=-2, frequency_penalty=2.0,
    bad_token_ids=[[1, 2], [3]], logprobs=20, prompt_logprobs=0,
)  # fmt: skip


def test_a_request_that_uses_everything_passes() -> None:
    request = Request("r", (1, 2, 3), FINE, num_emitted=2)
    replace(FINE, n=128, stop=("x",), bad_words=("y",))
    check_request(request, 50, 11)
    check_engine_request(request, 50, frozenset({1}))


def test_parameters_are_kept_in_one_form() -> None:
    assert FINE.logit_bias == ((5, 100.0), (7, -100))
    assert FINE.bad_token_ids == ((1, 2), (3,))
    assert SamplingParams(stop="x", bad_words="y") == SamplingParams(stop=("x",), bad_words=("y",))
    assert SamplingParams(stop=["x"], stop_token_ids=[4], top_k=-1).top_k == 0
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, bad_words=None) == SamplingParams()  # type: ignore[arg-type]
    assert isinstance(hash(FINE), int)


def test_numbers_of_numpy_become_plain_ones() -> None:
    wide = np.iinfo(np.uint64).max
    params = SamplingParams(
        np.int64(8), np.float32(0.5), np.int32(3), np.float64(0.5), np.uint64(wide), stop_token_ids=np.arange(2),
        logit_bias={np.int64(7): np.float32(1.5)}, bad_token_ids=np.ones((1, 2), np.int16),
    )  # fmt: skip
    plain = SamplingParams(8, 0.5, 3, 0.5, 2**64 - 1, stop_token_ids=(0, 1), logit_bias={7: 1.5}, bad_token_ids=((1, 1),))
    assert repr(params) == repr(plain)
    assert [one.seed for one in replace(params, n=2).completions()] == [
        one.seed for one in replace(plain, n=2).completions()
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 0}, "n is 0; it must be a whole number from 1 to 128"),
        ({"n": 2.0}, r"n is 2.0; it must be a whole number"),
        ({"n": 3, "temperature": 0}, "n is 3 at temperature 0, where all completions are the same"),
        ({"n": None}, "n is None"),
        ({"min_p": 1.5}, r"min_p is 1.5; it must lie in \[0.0, 1.0\]"),
        ({"min_p": "0.5"}, "min_p is '0.5'"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9}, "min_tokens 9 is above max_tokens 8"),
        ({"logit_bias": ((5, 101.0),)}, r"logit_bias of token 5 is 101.0; it must lie in \[-100, 100\]"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias of token 5 is nan"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias names a token twice"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"bad_words": ("",)}, "bad_words holds an empty string"),
        ({"bad_words": ("x",) * 512}, "more than 1024 bad_token_ids, where a bad word counts twice"),
        ({"bad_token_ids": ((),)}, "a bad word of 0 tokens"),
        ({"bad_token_ids": (range(65),)}, "a bad word of 65 tokens"),
        ({"logprobs": 21}, "logprobs is 21; it must be a whole number from 0 to 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 3.5e38}, r"temperature is 3.5e\+38; it must lie in \[0, 1000000\]"),
        ({"temperature": True}, "temperature is True"),
        ({"seed": True}, "seed is True"),
        ({"top_p": 1.1}, r"top_p is 1.1; it must lie in \(0, 1\]"),
        ({"top_k": -2}, "top_k is -2"),
        ({"stop": 5}, "stop is 5; it must be a list"),
        ({"stop": ("x", 5)}, "stop holds 5; it must hold texts"),
        ({"stop_token_ids": ("x",)}, "stop_token_ids holds 'x'; it must hold token ids"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": (5.5,)}, "stop_token_ids holds 5.5"),
        ({"stop_token_ids": (True,)}, "stop_token_ids holds True"),
        ({"logit_bias": {7: False}}, "logit_bias of token 7 is False"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias holds '5'; it must hold token ids"),
        ({"logit_bias": 3}, "logit_bias is 3; it must be a list, or a mapping"),
        ({"bad_token_ids": ((1.5,),)}, "bad_token_ids holds 1.5"),
    ],
)
def test_a_parameter_out_of_range_is_named(change: dict, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        replace(FINE, **change)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("r", (), FINE), "the prompt is empty"),
        (Request("r", (1, 2), FINE, num_emitted=2), "2 of 2 prompt tokens are said to be output"),
        (Request("r", (1, 2), FINE, num_emitted=-1), "-1 of 2 prompt tokens"),
        (Request("r", (1,) * 25, FINE), "exceed the context length 32"),
        (Request("r", (50,), FINE), r"prompt holds token id 50, outside the vocabulary \[0, 50\)"),
        (Request("r", (1,), replace(FINE, logit_bias={-1: 1.0})), "logit_bias holds token id -1"),
        (Request("r", (1,), replace(FINE, bad_token_ids=((1, 77),))), "bad_token_ids holds token id 77"),
        (Request("r", (1,), replace(FINE, stop_token_ids=(99,))), "stop_token_ids holds token id 99"),
    ],
)
def test_mismatches_with_the_model_are_named(request_: Request, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_request(request_, 50, 32)


def test_more_log_probabilities_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the vocabulary has tokens"):
        check_request(Request("r", (1,), SamplingParams(max_tokens=1, logprobs=9)), 8, 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": None}, "has no seed"),
        ({"n": 2}, "not for an engine"),
        ({"stop": ("x",)}, "not for an engine"),
        ({"bad_words": ("x",)}, "not for an engine"),
        ({"bad_token_ids": tuple((i,) for i in range(8))}, "may leave no token to draw"),
        ({"stop_token_ids": tuple(range(1, 8)), "min_tokens": 1}, "may leave no token to draw"),
    ],
)
def test_unsupported_parameters_are_refused(change: dict, reason: str) -> None:
    sampling = replace(SamplingParams(seed=1), **change)
    with pytest.raises(InvalidRequest, match=reason):
        check_engine_request(Request("r", (1,), sampling), 8, frozenset({0}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "structured_outputs has no constraint; give exactly one of json, json_object"),
        ({"json": "{}", "regex": "a"}, r"structured_outputs has 2 constraints \(json, regex\)"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[" * 9000}, "json is not JSON"),
        ({"json": "[]"}, "json is '\\[\\]'; it must be a JSON object"),
        ({"json": '{"a":' * 64 + "{}" + "}" * 64}, "json is nested more than 64 levels deep"),
        ({"structural_tag": "7"}, "structural_tag is '7'; it must be a JSON object"),
        ({"json": "{" + " " * 2**17 + "}"}, "json has 131074 characters; give 131072 at most"),
        ({"regex": "a" * 4097}, "regex has 4097 characters; give 4096 at most"),
        ({"grammar": 3}, "grammar is 3; it must be text"),
        ({"choice": ("a",) * 1025}, "choice has more than 1024 texts; give fewer"),
        ({"choice": ("a", "")}, "choice holds what is no text of 1 to 4096 characters"),
        ({"choice": ("a" * 4096,) * 33}, "choice has more than 131072 characters in all"),
    ],
)
def test_a_constraint_that_cannot_be_is_refused(fields: dict, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        replace(FINE, structured_outputs=StructuredOutputs(**fields))
    assert caught.value.param == "structured_outputs"


def test_schemas_may_be_mappings_and_a_choice_one_text() -> None:
    assert StructuredOutputs(json={"type": "object"}).json == '{"type": "object"}'
    assert StructuredOutputs(choice="yes").choice == ("yes",)
    for fields in ({"json": {}}, {"json_object": True}, {"regex": "a+"}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'}):
        replace(FINE, structured_outputs=StructuredOutputs(**fields))


def test_completions_draw_with_seeds_of_their_own() -> None:
    asked = replace(FINE, n=3, seed=2**64 - 1, bad_words=("x",), stop=("y",))
    split = asked.completions([(9,)])
    assert [one.seed for one in split] == [2**64 - 1, 0x9E3779B97F4A7C14, 0x3C6EF372FE94F829]
    assert [one.prompt_logprobs for one in split] == [0, None, None]
    for one in split:
        assert (one.n, one.stop, one.bad_words, one.bad_token_ids) == (1, (), (), ((1, 2), (3,), (9,)))
