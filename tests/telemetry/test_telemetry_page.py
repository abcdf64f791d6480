"""docs/telemetry.md lists what there is: its metrics table is the catalog's, and README and page agree on the settings."""

import re
from dataclasses import fields

from eyas.config import TelemetryConfig
from eyas.telemetry import metrics as catalog
from eyas.telemetry.metrics import Metric
from tests.telemetry.promql import ROOT

PAGE = ROOT / "docs" / "telemetry.md"
MARKS = re.compile(r"(<!-- metrics: .*? -->\n).*?(<!-- end of metrics -->)", re.DOTALL)
SERVICES = {
    "Every service": (catalog.SERVICE_INFO,),
    "Router": catalog.ROUTER,
    "Verifier": catalog.VERIFIER,
    "Draft": catalog.DRAFT,
}


def row(metric: Metric) -> str:
    labels = " ".join(f"`{label}`" for label in metric.label_names)
    unit = metric.unit.strip("{}")
    return f"| `{metric.family}` | {metric.kind} | {unit} | {labels} | {metric.text} | `{metric.name}` |"


def tables() -> str:
    """The catalog as people read it."""
    parts = []
    for service, metrics in SERVICES.items():
        lines = [
            f"### {service}",
            "",
            "| metric | kind | unit | labels | meaning | OpenTelemetry |",
            "|---|---|---|---|---|---|",
        ]
        parts.append("\n".join([*lines, *map(row, metrics)]))
    return "\n\n".join(parts)


def test_the_page_lists_every_metric() -> None:
    """On a difference the page is written anew; look at it and commit it."""
    text = PAGE.read_text(encoding="utf-8")
    fresh = MARKS.sub(lambda found: f"{found[1]}\n{tables()}\n\n{found[2]}", text)
    if fresh != text:
        PAGE.write_text(fresh, encoding="utf-8")
    assert fresh == text, "docs/telemetry.md was stale and has been written anew"


def test_the_page_explains_every_setting() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [field.name for field in fields(TelemetryConfig) if f"`{field.name}`" not in text]
