"""Each alert fires on its own condition and release only; dashboards select a release and name metrics that exist."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.telemetry.metrics import ALL_METRICS
from tests.support.services.promql import ALERTS, BOARDS, MISSING, alert_rules, dashboard_queries, names, selectors, tool

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
EXPOSED = {metric.family + suffix for metric in ALL_METRICS for suffix in SUFFIXES[metric.kind]}
OURS = 'namespace="eyas",release="eyas"'
STRANGERS = ('namespace="eyas",release="{}"', 'namespace="{}",release="eyas"', 'job="{}"')
OF_EVERY_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}

SERVICES = tuple(f'eyas_service_info{{instance="{kind[0]}",service="{kind}"}}' for kind in ("router", "verifier"))
# A healthy cluster: 10 requests, 100 verify steps with trees, 300 tokens and more in every minute.
HEALTHY = {
    **dict.fromkeys(SERVICES, "1x60"),
    'eyas_router_workers{instance="r",role="verifier"}': "1x60",
    'eyas_router_workers{instance="r",role="draft"}': "1x60",
    'eyas_router_requests_total{instance="r",model="m",status="OK"}': "0+10x60",
    'eyas_router_requests_total{instance="r",model="m",status="UNAVAILABLE"}': "0x60",
    'eyas_router_upstream_requests_total{instance="r",status="OK"}': "0+10x60",
    'eyas_router_upstream_retries_total{instance="r"}': "0x60",
    'eyas_router_upstream_requests_without_drafter_total{instance="r"}': "0x60",
    'gen_ai_server_time_per_output_token_seconds_bucket{instance="r",le="0.05"}': "0+10x60",
    'gen_ai_server_time_per_output_token_seconds_bucket{instance="r",le="0.5"}': "0+10x60",
    'gen_ai_server_time_per_output_token_seconds_bucket{instance="r",le="+Inf"}': "0+10x60",
    'eyas_verifier_generated_tokens_total{instance="v"}': "0+300x60",
    'eyas_verifier_preemptions_total{instance="v"}': "0x60",
    'eyas_verifier_step_age_seconds{instance="v"}': "0.02x60",
    'eyas_verifier_rejected_requests_total{instance="v",status="RESOURCE_EXHAUSTED"}': "0x60",
    'vllm:spec_decode_num_drafts_total{instance="v",model_name="m"}': "0+100x60",
    'vllm:spec_decode_num_accepted_tokens_total{instance="v",model_name="m"}': "0+200x60",
    'vllm:num_requests_waiting{instance="v",model_name="m"}': "2x60",
    'vllm:kv_cache_usage_perc{instance="v",model_name="m"}': "0.5x60",
    'eyas_draft_client_sessions{instance="v",drafter="d"}': "4x60",
    'eyas_draft_client_accepted_tokens_total{instance="v",drafter="d"}': "0+200x60",
    'eyas_draft_client_requests_total{instance="v",drafter="d",outcome="answered"}': "0+100x60",
    'eyas_draft_client_requests_total{instance="v",drafter="d",outcome="late"}': "0+1x60",
    'eyas_draft_client_circuit_breaker{instance="v",drafter="d",state="closed"}': "1x60",
}

# What goes wrong, as what differs from a healthy cluster.
SICK = {
    "EyasNoMetrics": dict.fromkeys(SERVICES, "_x60"),
    "EyasNoRouter": {SERVICES[0]: "_x60"},
    "EyasNoVerifier": {'eyas_router_workers{instance="r",role="verifier"}': "0x60"},
    "EyasErrorRate": {'eyas_router_requests_total{instance="r",model="m",status="UNAVAILABLE"}': "0+1x60"},
    "EyasVerifiersFailing": {'eyas_router_upstream_retries_total{instance="r"}': "0+2x60"},
    "EyasSlowTokens": {'gen_ai_server_time_per_output_token_seconds_bucket{instance="r",le="0.05"}': "0x60"},
    "EyasStepStuck": {'eyas_verifier_step_age_seconds{instance="v"}': "0.02x20 0+6x40"},
    "EyasDrafterUseless": {'eyas_draft_client_accepted_tokens_total{instance="v",drafter="d"}': "700x60"},
    "EyasDraftersIdle": {
        'vllm:spec_decode_num_drafts_total{instance="v",model_name="m"}': "100x60",
        'vllm:spec_decode_num_accepted_tokens_total{instance="v",model_name="m"}': "200x60",
    },
    "EyasLateDrafts": {'eyas_draft_client_requests_total{instance="v",drafter="d",outcome="late"}': "0+50x60"},
    "EyasCircuitOpen": {'eyas_draft_client_circuit_breaker{instance="v",drafter="d",state="closed"}': "0x60"},
    "EyasAcceptanceCollapse": {'vllm:spec_decode_num_accepted_tokens_total{instance="v",model_name="m"}': "0+5x60"},
    "EyasRequestsWithoutDrafter": {'eyas_router_upstream_requests_without_drafter_total{instance="r"}': "0+9x60"},
    "EyasQueueGrowing": {'vllm:num_requests_waiting{instance="v",model_name="m"}': "2+3x60"},
    "EyasKVCacheFull": {'vllm:kv_cache_usage_perc{instance="v",model_name="m"}': "0.99x60"},
    "EyasPreemptions": {'eyas_verifier_preemptions_total{instance="v"}': "0+60x60"},
    "EyasRejectingRequests": {'eyas_verifier_rejected_requests_total{instance="v",status="RESOURCE_EXHAUSTED"}': "0+3x60"},
}


def test_queries_are_read_for_the_metrics_that_they_name() -> None:
    query = (
        'sum by (a, le) (rate(x_total{b="y{z}"}[5m])) / on (c) group_left (d) 1e3 * vllm:y_z and min_over_time(w[1m]) > 0.5'
    )
    assert names(query) == {"x_total", "vllm:y_z", "w"}
    assert dict(selectors(query)) == {"x_total": 'b="y{z}"', "vllm:y_z": "", "w": ""}


def test_dashboards_and_alerts_name_metrics_of_the_catalog() -> None:
    queries = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alert_rules())]
    unknown = {where: missing for where, query in queries if (missing := names(query) - EXPOSED - OF_EVERY_PROCESS)}
    assert not unknown


def test_every_metric_of_the_catalog_is_on_a_dashboard() -> None:
    shown = {name for _, query in dashboard_queries() for name in names(query)}
    assert not [m.name for m in ALL_METRICS if not shown & {m.family + suffix for suffix in SUFFIXES[m.kind]}]


def test_dashboards_have_distinct_names_and_room_for_every_panel() -> None:
    boards = [json.loads(board.read_text()) for board in sorted(BOARDS.glob("*.json"))]
    assert [board["uid"] for board in boards] == ["eyas-capacity", "eyas-overview", "eyas-speculation"]
    for board in boards:
        cells = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(cells)) == len(cells)
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in board["panels"])


def test_alerts_have_a_description() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("critical", "warning")  # type: ignore[index]
        assert set(rule["annotations"]) == {"summary", "description"}


def test_every_metric_of_an_alert_is_of_one_release() -> None:
    matchers = [(rule["alert"], text) for rule in alert_rules() for _, text in selectors(rule["expr"])]
    assert len(matchers) > 20
    assert not [alert for alert, text in matchers if not text.startswith(OURS)]


def test_every_metric_of_a_dashboard_is_of_the_chosen_releases() -> None:
    chosen = 'namespace=~"$namespace",release=~"$release"'
    unselected = [
        where for where, query in dashboard_queries() for _, text in selectors(query) if not text.startswith(chosen)
    ]
    assert not unselected
    for board in sorted(BOARDS.glob("*.json")):
        variables = {item["name"]: item for item in json.loads(board.read_text())["templating"]["list"]}
        assert set(variables) == {"datasource", "namespace", "release"}
        assert not any(item.get("includeAll") for item in variables.values()), "all would include other servers"


def test_prometheus_reads_the_queries_of_the_dashboards(tmp_path: Path) -> None:
    promtool = tool("promtool")
    if promtool is None:
        pytest.skip(MISSING.format("promtool"))
    queries = [re.sub(r"\$__\w+", "1m", query) for _, query in dashboard_queries()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    result = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def of(labels: str, series: dict[str, str]) -> dict[str, str]:
    """The series with these labels too."""
    return {name.replace("{", f"{{{labels},"): values for name, values in series.items()}


def unit_test(alert: str, series: dict[str, str]) -> dict[str, Any]:
    """One of promtool's: after 50 minutes these alerts fire."""
    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "50m", "exp_samples": firing}
        ],
    }


def test_alerts_fire_only_on_their_condition(tmp_path: Path) -> None:
    assert set(SICK) == {rule["alert"] for rule in alert_rules()}
    promtool = tool("promtool")
    if promtool is None:
        pytest.skip(MISSING.format("promtool"))
    subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True, capture_output=True)
    healthy = of(OURS, HEALTHY)
    cases = [unit_test("", healthy), *(unit_test(alert, healthy | of(OURS, changes)) for alert, changes in SICK.items())]
    others = [of(labels.format(alert), HEALTHY | changes) for labels in STRANGERS for alert, changes in SICK.items()]
    cases.append(unit_test("", {name: values for series in (healthy, *others) for name, values in series.items()}))
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}))
    result = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
