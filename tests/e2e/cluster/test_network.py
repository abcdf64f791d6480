"""The central property through router, verifier and draft service as processes: the tokens do not depend on drafting."""

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from eyas.api.request import SamplingParams, StructuredOutputs
from eyas.errors import InvalidRequest
from eyas.rpc.messages import NO_DRAFTER
from eyas.services.local.cluster import Cluster
from tests.support import reference
from tests.support.services.grpc_client import Generated, generate, generate_staggered
from tests.support.tiny import DEMO

TARGET = str(DEMO / "target")
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, seed=0)
SEEDED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, ignore_eos=True, seed=7)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@functools.cache
def prompts() -> list[tuple[int, ...]]:
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:8]
    return [tuple(json.loads(line)["token_ids"][: 12 + 5 * i]) for i, line in enumerate(lines)]


@functools.cache
def expected(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    return reference.generate(TARGET, list(prompt), sampling)


def each(sampling: SamplingParams) -> list[SamplingParams]:
    """The same parameters with a seed and a length of its own for every prompt."""
    return [replace(sampling, seed=100 + i, max_tokens=12 - i) for i in range(8)]


STRUCTURED = {
    "json": StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    "regex": StructuredOutputs(regex="[a-z]{3,8}-[0-9]{2} ok"),
    "choice": StructuredOutputs(choice=("return self", "raise ValueError")),
}


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_outputs_equal_plain_constrained_ones(demo_cluster: Cluster, kind: str) -> None:
    for sampling in (GREEDY, SEEDED):
        asked = replace(sampling, max_tokens=60, ignore_eos=False, structured_outputs=STRUCTURED[kind])
        out, plain = (generate(demo_cluster["router"].address, prompts()[3], asked, drafter) for drafter in ("", NO_DRAFTER))
        assert out.token_ids == plain.token_ids
        assert out.stats.num_drafted > 0
        if plain.finish_reason == "stop" and kind == "json":
            assert isinstance(json.loads(plain.text)["a"], int)


def test_constraints_that_leave_no_token_are_refused(demo_cluster: Cluster) -> None:
    """Another verifier could not go on either, so none is tried."""
    asked = replace(GREEDY, structured_outputs=StructuredOutputs(choice=("~",)), bad_words=("~",))
    with pytest.raises(InvalidRequest, match="leaves no token to draw"):
        generate(demo_cluster["router"].address, prompts()[3], asked)


def test_random_requests_get_correct_results_and_statistics(demo_cluster: Cluster) -> None:
    prompt = prompts()[3]
    asked = replace(
        SEEDED, min_p=0.02, min_tokens=12, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=-0.3,
        logit_bias={300: 3.0}, bad_token_ids=((expected(prompt, SEEDED)[1],),), logprobs=2, prompt_logprobs=0, n=2,
    )  # fmt: skip
    for drafter in ("", NO_DRAFTER):
        chunks = [chunk.chunk for chunk in generate(demo_cluster["router"].address, prompt, asked, drafter).chunks]
        for index, alone in enumerate(asked.completions()):
            part = [chunk for chunk in chunks if chunk.index == index]
            tokens = [token for chunk in part for token in chunk.token_ids]
            assert tokens == expected(prompt, alone) != expected(prompt, SEEDED)
            assert [reported.token for chunk in part for reported in chunk.logprobs] == tokens
            assert [reported.token for reported in part[0].prompt_logprobs] == ([] if index else list(prompt))


@SAMPLINGS
def test_eight_staggered_requests_equal_the_plain_loop(demo_cluster: Cluster, sampling: SamplingParams) -> None:
    outs = generate_staggered(demo_cluster["router"].address, prompts(), each(sampling))
    assert [out.token_ids for out in outs] == [expected(p, s) for p, s in zip(prompts(), each(sampling), strict=True)]


def test_only_a_good_head_shortens_the_work(demo_cluster: Cluster, random_cluster: Cluster) -> None:
    for cluster in (demo_cluster, random_cluster):
        out = generate(cluster["router"].address, prompts()[0], replace(GREEDY, max_tokens=32))
        assert out.token_ids == expected(prompts()[0], replace(GREEDY, max_tokens=32))
        assert (out.stats.acceptance_length > 2.0) == (cluster is demo_cluster)


def test_killing_the_draft_service_half_way_changes_nothing(random_cluster: Cluster) -> None:
    """SIGKILL in the middle of two running requests, a greedy and a seeded one; they go on as plain decoding."""
    killed, outs = threading.Event(), [Generated(), Generated()]

    def kill_and_go_on(out: Generated) -> bool:
        if not killed.is_set() and all(other.stats.num_drafted > 0 for other in outs):
            random_cluster["draft"].process.kill()
            random_cluster["draft"].process.wait()
            killed.set()
        last = [chunk.chunk.verify_step for chunk in out.chunks[-5:]]
        return killed.is_set() and all(r is not None and r.drafted == 0 for r in last)

    asked = [replace(sampling, max_tokens=1500) for sampling in (GREEDY, SEEDED)]
    address, prompt = random_cluster["router"].address, prompts()[0]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda params, out: generate(address, prompt, params, "", kill_and_go_on, out), asked, outs))
    assert killed.is_set()
    for params, out in zip(asked, outs, strict=True):
        assert out.finish_reason is None, "plain rounds came before its end"
        plain = generate(address, prompt, replace(params, max_tokens=len(out.token_ids)), NO_DRAFTER)
        assert out.token_ids == plain.token_ids
    assert generate(address, prompts()[1], SEEDED).token_ids == expected(prompts()[1], SEEDED)
