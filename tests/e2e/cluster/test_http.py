"""The HTTP API of a whole cluster: its output equals that of gRPC, with drafting and without."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from openai import OpenAI

from eyas.api.request import SamplingParams
from eyas.rpc.messages import NO_DRAFTER
from eyas.services.local.cluster import Cluster
from eyas.services.local.demo import ROOT
from tests.support.services.grpc_client import generate

PROMPT = "class Queue:\n    def __init__(self"
SAMPLING = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=7, logprobs=2, n=2)
OPTIONS = {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "temperature": 0.8, "top_p": 0.95, "seed": 7, "n": 2}
DEMO_ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("drafter", ["", NO_DRAFTER])
def test_http_and_grpc_give_equal_output_for_a_seed(demo_cluster: Cluster, client: OpenAI, drafter: str) -> None:
    out = generate(demo_cluster["router"].address, PROMPT, SAMPLING, drafter)
    assert (out.stats.num_drafted > 0) == (drafter == "")
    answer = client.completions.create(**OPTIONS, logprobs=2, extra_body={"drafter": drafter})
    events = list(client.completions.create(**OPTIONS, stream=True, extra_body={"drafter": drafter}))
    for index, choice in enumerate(answer.choices):
        part = [chunk for chunk in out.chunks if chunk.chunk.index == index]
        assert choice.text == "".join(chunk.text for chunk in part)
        assert choice.finish_reason == part[-1].chunk.finish_reason
        logprobs = [entry.logprob for chunk in part for entry in chunk.chunk.logprobs]
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        streamed = [event.choices[0] for event in events if event.choices[0].index == index]
        assert "".join(piece.text for piece in streamed) == choice.text
    assert answer.usage.completion_tokens == len(out.token_ids)


def test_a_chat_goes_through_the_template(demo_cluster: Cluster, client: OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=24, temperature=0)
    plain = replace(SAMPLING, max_tokens=24, temperature=0, n=1)
    assert answer.choices[0].message.content == generate(demo_cluster["router"].address, PROMPT, plain, NO_DRAFTER).text


def test_the_openai_example_of_the_readme_works(demo_cluster: Cluster) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert DEMO_ADDRESS in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace(DEMO_ADDRESS, demo_cluster.http)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown_text()


def shown_text() -> str:
    """The text that the README shows as the answer to its examples."""
    (text,) = re.findall(r"^```text\n(.*?)\n```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.parametrize(("page", "num_commands"), [("README.md", 1), ("docs/quickstart.md", 3)])
def test_the_curl_commands_of_the_pages_work(demo_cluster: Cluster, page: str, num_commands: int) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"^curl .*?(?<!\\)\n", text, re.MULTILINE | re.DOTALL)
    assert len(commands) == num_commands
    for command in commands:
        assert DEMO_ADDRESS in command
        local = f"{command.strip()} --fail --silent".replace(DEMO_ADDRESS, demo_cluster.http)
        done = subprocess.run(["bash", "-c", local], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        (choice,) = json.loads(done.stdout)["choices"]
        assert choice["text"] == shown_text() if page == "README.md" else choice["finish_reason"] in {"length", "stop"}
