"""docs/operations.md explains every alert, and the settings and metrics that it names exist."""

import re
from typing import Any

import yaml

from tests.deploy.charts import CHART, of_kind, rendered
from tests.support.repository import ROOT
from tests.support.services.promql import names

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
ALERTS = ROOT / "deploy" / "helm" / "dashboards" / "alerts.yaml"


def alerts() -> list[str]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_has_a_heading_with_an_action() -> None:
    sections = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=\n### |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(alerts())
    assert all("*What to do:*" in text for text in sections.values())


def test_values_that_the_page_names_exist() -> None:
    """Or are settings of a service. Those of a Ray application have a section of their own."""
    tops, of_chart = "|".join(VALUES), PAGE.partition("\n## Ray Serve\n")[0]
    named = set(re.findall(rf"`((?:{tops})(?:\.\w+)+)(?:[:=][^`]*)?`", of_chart))
    assert len(named) > 10
    settings = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    def exists(path: str) -> bool:
        node: Any = VALUES
        for key in path.split("."):
            if key == "config":
                return True
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True

    assert not [path for path in named if not exists(path) and f"`{path.partition('.')[2]}`" not in settings]


def test_metrics_used_for_scaling_are_documented() -> None:
    scaled = of_kind(rendered("kubernetes discovery, no redis"), "ScaledObject")
    triggers = [trigger for item in scaled for trigger in item["spec"]["triggers"]]
    metrics = {metric for trigger in triggers for metric in names(trigger["metadata"]["query"])}
    page = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    assert len(metrics) >= 3
    assert not [metric for metric in metrics if re.sub("_(total|sum)$", "", metric) not in page]
