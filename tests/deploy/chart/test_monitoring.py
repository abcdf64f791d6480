"""Alerts and KEDA triggers of the chart are of their own release, and pools grow under load in a real Prometheus."""

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.services.local.cluster import free_port
from tests.deploy.charts import named, of_kind, rendered, settings, template, write_values
from tests.support.services.promql import ALERTS, MISSING, selectors, tool

SCALED = "kubernetes discovery, no redis"
RELEASE = 'namespace="eyas",release="demo"'
SIZES = range(1, 9)
LOAD = 3.2  # drafters' worth of work
INTERVAL, WINDOW = 15, 600  # seconds: of a scrape, and of the time that the pool has one size
START = 1_700_000_000


def queries(name: str) -> list[str]:
    """Every PromQL expression of a rendering."""
    rules = [
        rule
        for item in of_kind(rendered(name), "PrometheusRule")
        for group in item["spec"]["groups"]
        for rule in group["rules"]
    ]
    triggers = [trigger for item in of_kind(rendered(name), "ScaledObject") for trigger in item["spec"]["triggers"]]
    return [rule["expr"] for rule in rules] + [trigger["metadata"]["query"] for trigger in triggers]


@pytest.mark.parametrize("name", ["monitored", SCALED])
def test_alerts_and_triggers_select_the_metrics_of_their_release(name: str) -> None:
    matchers = [text for query in queries(name) for _, text in selectors(query)]
    assert len(matchers) > 5
    assert all(text.startswith(RELEASE) for text in matchers)


def test_the_rendered_alerts_are_those_of_the_file() -> None:
    (rule,) = of_kind(rendered("monitored"), "PrometheusRule")
    plain = yaml.safe_load(ALERTS.read_text().replace('namespace="eyas",release="eyas"', RELEASE))
    assert rule["spec"] == plain


def test_scraped_metrics_have_the_label_of_their_release() -> None:
    (monitor,) = of_kind(rendered("monitored"), "ServiceMonitor")
    for endpoint in monitor["spec"]["endpoints"]:
        assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": "demo"}]
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["eyas"]}


def test_other_matchers_reach_alerts_and_triggers(tmp_path: Path) -> None:
    values = {
        "prometheus": {"matchers": 'job="{{ .Release.Name }}"', "address": "http://p"},
        "prometheusRule": {"enabled": True},
    }
    file = write_values(tmp_path, values | {"draft": {"autoscaling": {"kind": "keda"}}})
    text = yaml.safe_dump(of_kind(template("--values", file), "PrometheusRule", "ScaledObject"))
    assert 'job="demo"' in text
    assert "release=" not in text


def test_given_triggers_replace_those_of_the_chart(tmp_path: Path) -> None:
    given = {"type": "prometheus", "metadata": {"query": 'up{release="{{ .Release.Name }}"}', "threshold": "1"}}
    file = write_values(tmp_path, {"draft": {"autoscaling": {"kind": "keda", "triggers": [given]}}})
    (scaled,) = of_kind(template("--values", file), "ScaledObject")
    assert scaled["spec"]["triggers"] == [{**given, "metadata": {"query": 'up{release="demo"}', "threshold": "1"}}]


def test_a_verifier_is_full_with_three_quarters_of_its_sequences() -> None:
    chosen = settings(
        ["verifier.autoscaling.kind=keda", "prometheus.address=http://p", "verifier.config.engine.max_num_seqs=20"]
    )
    (scaled,) = of_kind(template(*chosen), "ScaledObject")
    assert scaled["spec"]["triggers"][0]["metadata"]["threshold"] == "15"


# Replay: the metrics of pools of each size under the same load, asked as KEDA asks.


def drafting(size: int, load: float) -> Mapping[str, float]:
    """Counters by second of one verifier and `size` draft services. load: drafters' worth of work."""
    busy, late = min(1.0, load / size), max(0.02, 1 - 0.9 * size / load) if load else 0.0
    requests = 100.0 if load else 0.0
    step = {f'eyas_draft_step_duration_seconds_sum{{{RELEASE},instance="d{i}"}}': busy for i in range(size)}
    asked = f'eyas_draft_client_requests_total{{{RELEASE},instance="v",drafter="d",outcome='
    return step | {f'{asked}"late"}}': late * requests, f'{asked}"answered"}}': (1 - late) * requests}


def exposition(windows: Mapping[int, Mapping[str, float]]) -> str:
    """OpenMetrics of counters with such a rate, and of gauges with such a value. windows: by the second of their start."""
    lines: dict[str, list[str]] = {}
    for start, series in windows.items():
        for name, value in series.items():
            metric = name.partition("{")[0]
            kind = {"total": "counter", "sum": "summary"}.get(metric.rpartition("_")[2], "gauge")
            family = metric.removesuffix("_total").removesuffix("_sum")
            samples = lines.setdefault(f"# TYPE {family} {kind}", [])
            for at in range(0, WINDOW // 2, INTERVAL):
                samples.append(f"{name} {value if kind == 'gauge' else value * at} {start + at}")
    return "\n".join("\n".join([head, *samples]) for head, samples in lines.items()) + "\n# EOF\n"


@contextmanager
def prometheus(folder: Path, text: str) -> Iterator[str]:
    """A Prometheus that holds these metrics; its address."""
    promtool, server = tool("promtool"), tool("prometheus")
    if promtool is None or server is None:
        pytest.skip(MISSING.format("prometheus"))
    (folder / "metrics.txt").write_text(text)
    (folder / "prometheus.yml").write_text("{}")
    blocks = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(folder / "metrics.txt"), str(folder / "data")]
    subprocess.run(blocks, check=True, capture_output=True)
    address = f"127.0.0.1:{free_port()}"
    command = [server, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    options = [f"--web.listen-address={address}", "--storage.tsdb.retention.time=99y"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not _is_ready(f"http://{address}/-/ready"):
            assert process.poll() is None, "prometheus did not start"
            assert time.monotonic() < deadline, "prometheus is not ready"
            time.sleep(0.05)
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def asked(address: str, query: str, at: int) -> list[float]:
    """The samples of a query at this second."""
    words = urllib.parse.urlencode({"query": query, "time": at})
    with urllib.request.urlopen(f"{address}/api/v1/query?{words}", timeout=30) as answer:
        result = json.load(answer)["data"]["result"]
    return [float(sample["value"][1]) for sample in result]


def wanted(address: str, triggers: list[dict[str, Any]], size: int, at: int) -> int:
    """Pods that KEDA's HorizontalPodAutoscaler asks for, of `size` present ones; a trigger without data keeps them.

    Value: size x value / threshold. AverageValue: value / threshold. A result within a tenth of `size` changes nothing.
    """
    sizes = []
    for trigger in triggers:
        values, threshold = asked(address, trigger["metadata"]["query"], at), float(trigger["metadata"]["threshold"])
        assert all(math.isfinite(value) for value in values), trigger
        in_all = sum(values) * (size if trigger.get("metricType") == "Value" else 1)
        keeps = not values or abs(in_all / threshold / size - 1) <= 0.1
        sizes.append(size if keeps else math.ceil(in_all / threshold - 1e-9))
    return max(sizes)


def triggers(component: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = named(rendered(SCALED), "ScaledObject", f"demo-eyas-{component}")["spec"]["triggers"]
    return found


def test_the_draft_pool_grows_under_load_and_settles(tmp_path: Path) -> None:
    ends = {size: START + size * WINDOW + WINDOW // 2 - INTERVAL for size in SIZES}
    windows = {START + size * WINDOW: drafting(size, LOAD) for size in SIZES}
    with prometheus(tmp_path, exposition(windows)) as address:
        sizes = {size: min(wanted(address, triggers("draft"), size, ends[size]), SIZES[-1]) for size in SIZES}
        too_few = [size for size in SIZES if size < LOAD]
        for trigger in triggers("draft"):
            assert all(wanted(address, [trigger], size, ends[size]) > size for size in too_few), trigger
    for first in SIZES:
        size, seen = first, [first]
        while sizes[size] != size:
            size = sizes[size]
            assert size not in seen, f"the pool swings: {seen}"
            seen.append(size)
        assert LOAD < size <= LOAD / 0.7 + 1, seen


def test_without_traffic_or_data_no_trigger_is_wrong(tmp_path: Path) -> None:
    with prometheus(tmp_path, exposition({START: drafting(4, 0.0)})) as address:
        assert wanted(address, triggers("draft"), 4, START + WINDOW // 2 - INTERVAL) == 0, "an idle pool shrinks"
        assert wanted(address, triggers("draft"), 4, START - WINDOW) == 4, (
            "a Prometheus that lost its targets changes nothing"
        )
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in triggers("draft"))


def test_the_verifier_pool_follows_requests_and_kv_cache(tmp_path: Path) -> None:
    """Three verifiers of 1,000 tokens and 64 sequences. First requests are scarce, then tokens."""

    def serving(waiting: float, queued: float) -> dict[str, float]:
        tokens = {"used": 700.0, "free": 300.0, "queued": queued}
        states = {(i, state): value for i in range(3) for state, value in tokens.items()}
        cache = {
            f'eyas_verifier_kv_cache_tokens{{{RELEASE},instance="v{i}",state="{s}"}}': n for (i, s), n in states.items()
        }
        running = {f'vllm:num_requests_running{{{RELEASE},instance="v{i}"}}': 48.0 for i in range(3)}
        return cache | running | {f'vllm:num_requests_waiting{{{RELEASE},instance="v{i}"}}': waiting for i in range(3)}

    windows = {START: serving(0, 0), START + WINDOW: serving(32, 0), START + 2 * WINDOW: serving(0, 700)}
    with prometheus(tmp_path, exposition(windows)) as address:
        found = [wanted(address, triggers("verifier"), 3, start + WINDOW // 2 - INTERVAL) for start in windows]
    assert found == [3, 5, 6]
