"""The rendered CPU demo runs as processes: pods are probed, serve requests, and stop under load without a lost request."""

import json
import shlex
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.api.request import SamplingParams
from eyas.rpc.messages import NO_DRAFTER
from tests.deploy.charts import CHART, named, run_helm, settings, template
from tests.deploy.running.kubelet import Node, running
from tests.deploy.running.load import Load
from tests.support.services.grpc_client import Generated, generate

pytestmark = pytest.mark.nightly

SHORT = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, ignore_eos=True, seed=7)
PROMPT = (0, 282, 659, 276)
NUM_REQUESTS = 4
AHEAD_S = 0.3  # the hooks before the signals overlap, so that requests need not last longer
SAMPLING = SamplingParams(max_tokens=224, temperature=0.8, top_p=0.95, ignore_eos=True, seed=7)

DRAFT, VERIFIER, ROUTER, REDIS = (f"demo-eyas-{part}" for part in ("draft", "verifier", "router", "redis"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    values = str(CHART / "values" / "cpu-demo.yaml")
    objects = template("--values", values, *settings(("verifier.config.validate_head=never",)))
    with running(objects, tmp_path_factory.mktemp("node")) as node:
        yield node


def test_every_workload_of_the_demo_runs_and_passes_its_probes(node: Node) -> None:
    assert sorted(node.pods) == sorted([DRAFT, VERIFIER, ROUTER, REDIS])


def test_the_request_of_the_notes_is_answered(node: Node) -> None:
    notes = run_helm("install", "demo", ".", "--dry-run=client", "--values", str(CHART / "values" / "cpu-demo.yaml")).stdout
    curl = shlex.split(notes[notes.index("curl ") :].replace("\\\n", " ").split("\n\n")[0].split("\nThe ")[0])
    body, path = curl[curl.index("-d") + 1], curl[1].partition("8000")[2]
    headers = dict(curl[i + 1].split(": ") for i, word in enumerate(curl) if word == "-H")
    request = urllib.request.Request(f"http://{node.endpoint(ROUTER, 'http')}{path}", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=250) as answer:
        answered = json.load(answer)
    assert answered["choices"][0]["text"]
    assert answered["usage"]["completion_tokens"] == json.loads(body)["max_tokens"]


def test_every_service_is_scraped_where_the_monitor_looks(node: Node) -> None:
    for service in (f"{ROUTER}-metrics", VERIFIER, DRAFT):
        with urllib.request.urlopen(f"http://{node.endpoint(service, 'metrics')}/metrics", timeout=60) as answer:
            assert b"# TYPE eyas_" in answer.read(), service


def test_each_service_rolls_under_load_without_a_failed_request(node: Node) -> None:
    """A rolling restart: a second pod of each, then the first one stopped, with clients that go on asking."""
    plain = generate(node.endpoint(ROUTER, "grpc"), PROMPT, SHORT, NO_DRAFTER).token_ids
    load = Load(lambda: node.endpoint(ROUTER, "grpc"), PROMPT, SHORT)
    old = dict(node.pods)
    node.start(DRAFT, VERIFIER, ROUTER)
    node.wait(DRAFT, VERIFIER, ROUTER)
    with load.running():
        for name in (DRAFT, VERIFIER, ROUTER):
            load.go_on()
            old[name].terminate()
            assert old[name].ended() == 0
        load.go_on()
    assert not load.failures
    assert all(out.token_ids == plain for out in load.outs)
    assert load.outs[-1].stats.num_drafted, "the second drafter drafts"


def test_no_command_line_holds_the_password(node: Node) -> None:
    password = named(node.objects, "Secret", REDIS)["stringData"]["password"]
    lines = {name: Path(f"/proc/{pod.process.pid}/cmdline").read_text() for name, pod in node.pods.items()}
    assert len(lines) == 4
    assert all(lines.values())
    assert not [name for name, line in lines.items() if password in line]


def test_all_stop_in_order_under_load_and_nothing_is_lost(node: Node) -> None:
    """First the drafter, then the verifier and the router at once, all with requests running; each ends by itself with 0."""
    endpoint = node.endpoint(ROUTER, "grpc")
    plain = generate(endpoint, PROMPT, SAMPLING, NO_DRAFTER).token_ids
    outs = [Generated() for _ in range(NUM_REQUESTS)]
    threads = [threading.Thread(target=generate, args=(endpoint, PROMPT, SAMPLING), kwargs={"into": out}) for out in outs]
    for thread, out in zip(threads, outs, strict=True):
        thread.start()
        assert out.begun.wait(250)
    stops = [threading.Thread(target=node.pods[name].terminate) for name in (DRAFT, VERIFIER, ROUTER)]
    for stop in stops:
        stop.start()
        time.sleep(AHEAD_S * (stop is stops[0]))
    for stop in stops:
        stop.join()
    running_at_stop = sum(out.finish_reason is None for out in outs)
    assert [node.pods[name].ended() for name in (DRAFT, VERIFIER, ROUTER)] == [0, 0, 0]
    for thread in threads:
        thread.join(60)
    assert [out.token_ids for out in outs] == [plain] * NUM_REQUESTS
    assert running_at_stop, "the load was over before the stop; ask for more tokens"
    assert any(out.stats.num_drafted for out in outs)
    node.pods[REDIS].terminate()
    assert node.pods[REDIS].ended() == 0


def test_logs_of_the_services_hold_no_password(node: Node) -> None:
    password = named(node.objects, "Secret", REDIS)["stringData"]["password"]
    assert not [pod.name for pod in node.started if password in pod.log.read_text()]
