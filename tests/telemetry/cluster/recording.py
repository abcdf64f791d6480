"""Run requests on a cluster of processes and record its traces, metrics, logs and Prometheus query results."""

import functools
import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from eyas.api.outputs import TextChunk
from eyas.api.request import Request, SamplingParams
from eyas.rpc import convert
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.services.local.cluster import Cluster, free_port
from eyas.services.local.demo import running_demo
from eyas.v1 import generation_pb2_grpc
from tests.support.services.collector import Collector, collecting
from tests.support.services.forks import forked_services
from tests.support.services.promql import alert_rules, dashboard_queries, tool
from tests.support.strategies import unchecked

SERVICES = ("router", "verifier", "draft")
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
SECRET = "def swordfish_and_marzipan("
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = ("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01")
HTTP_TRACE_ID = "7a6f1d4b2c9e4f03b1d5a8c7e6f09182"
HTTP_CALLER = {"traceparent": f"00-{HTTP_TRACE_ID}-00f067aa0ba902b7-01", "X-Request-Id": "web"}
SAMPLING = SamplingParams(max_tokens=48, temperature=0.8, ignore_eos=True, seed=7)


@dataclass
class Watched:
    """collector: receives data until the cluster stops. web: the usage of the HTTP response. metrics: OpenMetrics by
    service. results: of Prometheus, by query."""

    collector: Collector
    speculative: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    web: dict[str, Any] = field(default_factory=dict)
    refusal: grpc.StatusCode | None = None
    metrics: dict[str, str] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, list[Any]] | None = None


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """Run it all once."""
    ports = {name: free_port() for name in SERVICES}
    endpoint = free_port()
    settings = [
        "verifier.telemetry.step_span_ratio=0.5",
        "verifier.draft_client.draft_timeout_s=30",
        "verifier.validate_head=never",
        "verifier.engine.draft_budget=fixed",
    ]
    for name, port in ports.items():
        settings += [f"{name}.telemetry.metrics_port={port}", f"{name}.telemetry.log_format=json"]
    with pytest.MonkeyPatch.context() as patch, collecting(endpoint) as collector:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{endpoint}")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        run = Watched(collector)
        with (
            forked_services(),
            running_demo(free_port(), settings) as cluster,
            scraping(folder, ports.values()) as prometheus,
        ):
            for child in cluster.services:
                cluster.wait(child)
            ask(run, cluster)
            run.metrics = {name: scrape(port) for name, port in ports.items()}
            if prometheus is not None:
                run.results = queried(prometheus)
            files = {child.name: child.log for child in cluster.services}
            run.logs = {name: file.read_text().splitlines() for name, file in files.items()}
        yield run


def ask(run: Watched, cluster: Cluster) -> None:
    """A drafted request within the caller's trace, the same without a drafter and by HTTP, and one that is refused."""
    with open_sync_channel(cluster["router"].address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        def tokens(call: GenerateCall, *metadata: tuple[str, str]) -> Sequence[TextChunk]:
            answers = stub.Generate(convert.generate_call_to_proto(call), timeout=250, metadata=metadata)
            return [convert.text_chunk_from_proto(message) for message in answers]

        while not any(chunk.chunk.verify_step and chunk.chunk.verify_step.drafted for chunk in tokens(_call("", "warm-up"))):
            cluster.check()
        run.speculative = _ids(tokens(_call("", "drafted"), CALLER))
        run.plain = _ids(tokens(_call(NO_DRAFTER, "plain")))
        run.web = browse(cluster.http)
        try:
            tokens(GenerateCall(Request("refused", (), unchecked(SamplingParams(), top_p=3.0)), prompt_text=SECRET))
        except grpc.RpcError as error:
            run.refusal = error.code()


def _call(drafter: str, name: str) -> GenerateCall:
    return GenerateCall(Request(name, (), SAMPLING), prompt_text=SECRET, drafter=drafter)


def _ids(chunks: Sequence[TextChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.chunk.token_ids]


def browse(base: str) -> dict[str, Any]:
    """Send the drafted request by HTTP; return its usage."""
    body = {"model": "demo", "prompt": SECRET, "max_tokens": 48, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    headers = HTTP_CALLER | {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=250) as answer:
        usage: dict[str, Any] = json.load(answer)["usage"]
    return usage


def scrape(port: int, accept: str = OPENMETRICS) -> str:
    """What Prometheus would get."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


# As the alerts expect them.
LABELS = {"namespace": "eyas", "release": "eyas"}


@contextmanager
def scraping(folder: Path, ports: Iterator[int]) -> Iterator[str | None]:
    """The URL of a Prometheus that scrapes these ports; None where there is no Prometheus."""
    prometheus = tool("prometheus")
    if prometheus is None:
        yield None
        return
    targets = [f"127.0.0.1:{port}" for port in ports]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": "eyas", "static_configs": [{"targets": targets, "labels": LABELS}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    flags = [
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([prometheus, *flags], stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"})
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def queried(url: str) -> dict[str, list[Any]]:
    """The results of every query of dashboards and alerts, once all targets have been scraped three times more: a rate
    needs two samples of a series, and what a scrape reads may be older than its time."""
    since = time.time()

    def scraped(series: Mapping[str, Any]) -> bool:
        return sum(moment > since for moment, _ in series["values"]) >= 3

    while sum(map(scraped, query(url, "eyas_service_info[5m]"))) < len(SERVICES):
        time.sleep(0.2)
    asked = [expression for _, expression in dashboard_queries()] + [rule["expr"] for rule in alert_rules()]
    variables = {"$__rate_interval": "1m"} | {f"${label}": value for label, value in LABELS.items()}

    def filled(expression: str) -> str:
        return functools.reduce(lambda text, name: text.replace(name, variables[name]), variables, expression)

    return {expression: query(url, filled(expression)) for expression in asked}


def query(url: str, expression: str) -> list[Any]:
    """The series of an instant query; none while Prometheus is not up. Fails for an expression that it refuses."""
    parameters = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{parameters}", timeout=60) as answer:
            found: Mapping[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []
    assert found["status"] == "success", expression
    return list(found["data"]["result"])
