"""With discovery.kind kubernetes and no Redis the CPU demo's pods find one another by EndpointSlices only."""

import time
from pathlib import Path

import pytest

from eyas.api.request import SamplingParams
from eyas.rpc.messages import NO_DRAFTER
from tests.deploy.charts import CHART, settings, template
from tests.deploy.running.control_plane import control_plane
from tests.deploy.running.kubelet import Node, started
from tests.support.services.grpc_client import generate

pytestmark = pytest.mark.nightly

DRAFT, VERIFIER, ROUTER = (f"demo-eyas-{part}" for part in ("draft", "verifier", "router"))
PROMPT = (0, 282, 659, 276)
SAMPLING = SamplingParams(max_tokens=32, temperature=0.8, ignore_eos=True, seed=7)
SETTINGS = ("discovery.kind=kubernetes", "redis.kind=none", "verifier.config.validate_head=never")


def test_pods_without_redis_discover_only_ready_pods(tmp_path: Path) -> None:
    objects = template("--values", str(CHART / "values" / "cpu-demo.yaml"), *settings(SETTINGS))
    node = Node(objects, tmp_path)
    with control_plane(node) as api, started(node):
        assert sorted(node.pods) == sorted([DRAFT, VERIFIER, ROUTER])
        assert api.num_lists, "the router was ready without asking"
        endpoint = node.endpoint(ROUTER, "grpc")
        plain = generate(endpoint, PROMPT, SAMPLING, NO_DRAFTER)
        deadline = time.monotonic() + 250
        while not (drafted := generate(endpoint, PROMPT, SAMPLING)).stats.num_drafted:
            assert time.monotonic() < deadline, "the drafter is not found"
        assert drafted.token_ids == plain.token_ids
        node.pods[VERIFIER].leaving = True
        deadline = time.monotonic() + 250
        while node.pods[ROUTER].is_healthy():
            assert time.monotonic() < deadline, "the router goes on with a verifier that is no endpoint any more"
            time.sleep(0.05)
        assert node.pods[ROUTER].passes("readiness"), "it stays an endpoint, to answer with 503 and Retry-After"
