"""What a request sees of its verify steps: they rebuild the output, and asking for them changes no token."""

import time
from typing import Any

import httpx
import pytest

from eyas.api.outputs import TextChunk
from eyas.api.request import Request, SamplingParams
from eyas.rpc import convert
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.services.local.cluster import Cluster
from eyas.v1.generation_pb2_grpc import GenerationStub

PROMPT = "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0.8, "seed": 11, "ignore_eos": True}
PARTS = {"dspark", "prompt_lookup", "dspark+prompt_lookup"}


def complete(cluster: Cluster, **changes: object) -> dict[str, Any]:
    answer = httpx.post(f"{cluster.http}/v1/completions", json=BODY | changes, timeout=250)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def check_tree(step: dict[str, Any]) -> None:
    """The accepted nodes are a path from the root, and its tokens are the step's, but for the last."""
    root, *drafted = step["nodes"]
    assert (root["parent"], root["accepted"], root["drafter"], root["prob"]) == (None, True, None, None)
    assert all(0 <= node["parent"] < place for place, node in enumerate(drafted, 1))
    assert all(node["drafter"] in PARTS and 0 <= node["prob"] <= 1 for node in drafted)
    path = [place for place, node in enumerate(step["nodes"]) if node["accepted"]]
    assert [step["nodes"][place]["parent"] for place in path[1:]] == path[:-1]
    accepted = [step["nodes"][place] for place in path[1:]]
    tokens = step["tokens"][: len(accepted)]
    assert [node["id"] for node in accepted] == [token["id"] for token in tokens]
    assert [node["drafter"] for node in accepted] == [token["drafter"] for token in tokens]
    assert all(token["drafter"] is None for token in step["tokens"][len(accepted) :])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_verify_steps_rebuild_the_output(demo_cluster: Cluster, temperature: float) -> None:
    choice = complete(demo_cluster, return_verify_steps=True, temperature=temperature)
    steps = choice["verify_steps"]
    assert [step["index"] for step in steps] == list(range(len(steps)))
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == choice["text"]
    assert sum(len(step["tokens"]) for step in steps) == BODY["max_tokens"]
    assert (steps[0]["nodes"], len(steps[0]["tokens"])) == ([], 1), "the prefill has no tree"
    before = steps[0]
    for step in steps[1:]:
        check_tree(step)
        assert step["nodes"][0]["id"] == before["tokens"][-1]["id"], "the root is the last committed token"
        before = step
    assert {node["drafter"] for step in steps for node in step["nodes"][1:]} >= {"dspark"}
    assert any(len(step["tokens"]) > 1 for step in steps)


def test_times_are_measured_and_add_up(demo_cluster: Cluster) -> None:
    began = time.perf_counter()
    steps = complete(demo_cluster, return_verify_steps=True)["verify_steps"][1:]
    request_ms = (time.perf_counter() - began) * 1e3
    assert 0 < sum(step["wait_ms"] + step["verify_ms"] for step in steps) < request_ms
    for step in steps:
        assert 0 < step["verify_ms"] < 60_000
        assert step["rows"] >= len(step["nodes"])
        if len(step["nodes"]) > 1:
            assert step["method"] == "dspark+prompt_lookup"
            assert step["draft_ms"] > 0
            assert min(step["wire_ms"], step["wait_ms"]) >= 0


def test_the_output_is_equal_with_and_without_verify_steps(demo_cluster: Cluster) -> None:
    text = complete(demo_cluster)["text"]
    for changes in ({}, {"drafter": NO_DRAFTER}, {"num_draft_tokens": 4}):
        choice = complete(demo_cluster, return_verify_steps=True, **changes)
        assert choice.pop("verify_steps")
        assert choice["text"] == text
    assert "verify_steps" not in complete(demo_cluster)


def test_plain_decoding_has_steps_without_drafts(demo_cluster: Cluster) -> None:
    for changes in ({"drafter": NO_DRAFTER}, {"num_draft_tokens": 1}):
        steps = complete(demo_cluster, return_verify_steps=True, **changes)["verify_steps"]
        assert len(steps) == BODY["max_tokens"]
        assert all(len(step["nodes"]) == 1 and step["method"] is None for step in steps[1:])


def test_num_draft_tokens_bounds_the_trees(demo_cluster: Cluster) -> None:
    steps = complete(demo_cluster, return_verify_steps=True, num_draft_tokens=4)["verify_steps"]
    assert max(len(step["nodes"]) for step in steps) == 4


def test_a_stop_string_cuts_the_accepted_path(demo_cluster: Cluster) -> None:
    text = complete(demo_cluster, temperature=0)["text"]
    stop = text[len(text) // 2 :][:3]
    choice = complete(demo_cluster, temperature=0, stop=stop, return_verify_steps=True)
    assert choice["finish_reason"] == "stop"
    assert "".join(token["text"] for step in choice["verify_steps"] for token in step["tokens"]) == choice["text"]
    check_tree(choice["verify_steps"][-1])


def test_grpc_has_details_only_if_asked(demo_cluster: Cluster) -> None:
    def chunks(asks: bool) -> list[TextChunk]:
        sampling = SamplingParams(48, 0.8, seed=11, ignore_eos=True)
        call = GenerateCall(Request("", (), sampling, return_verify_steps=asks), PROMPT)
        with open_sync_channel(demo_cluster["router"].address) as channel:
            answers = GenerationStub(channel).Generate(convert.generate_call_to_proto(call), timeout=250)
            return list(map(convert.text_chunk_from_proto, answers))

    with_details, without = chunks(asks=True), chunks(asks=False)
    steps = [[chunk.chunk.verify_step for chunk in each if chunk.chunk.verify_step] for each in (with_details, without)]
    assert all(step.details and step.details.verify_ms > 0 for step in steps[0])
    assert any(step.details and step.details.path for step in steps[0])
    assert not any(step.details for step in steps[1])
    tokens = [[token for chunk in each for token in chunk.chunk.token_ids] for each in (with_details, without)]
    assert tokens[0] == tokens[1]
