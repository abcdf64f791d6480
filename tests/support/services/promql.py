"""The queries of the dashboards and alerts, the metrics that they name, and a real Prometheus where there is one."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
BOARDS = ROOT / "deploy" / "helm" / "dashboards"
ALERTS = BOARDS / "alerts.yaml"
FETCHED = ROOT / ".venv" / "prometheus" / "usr" / "bin"
MISSING = "there is no {}; `make prometheus` fetches the Debian package prometheus into .venv"

_STRING = re.compile(r'"[^"]*"')
_SELECTOR = re.compile(r"\{[^}]*\}|\[[^\]]*\]")
_LABELS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
_MATCHERS = re.compile(r'\{((?:"[^"]*"|[^}"])*)\}')
_WORDS = {"and", "or", "unless", "bool", "offset"}


def selectors(expression: str) -> list[tuple[str, str]]:
    """Return each metric that a PromQL expression names, with the matchers that follow it."""
    bare = expression
    for part in (_STRING, _SELECTOR, _LABELS):
        bare = part.sub(lambda found: " " * len(found[0]), bare)
    found = [name for name in _NAME.finditer(bare) if name[0] not in _WORDS]
    texts = [_MATCHERS.match(expression, name.end()) for name in found]
    return [(name[0], text[1] if text else "") for name, text in zip(found, texts, strict=True)]


def names(expression: str) -> set[str]:
    """Return the metrics that a PromQL expression names."""
    return {name for name, _ in selectors(expression)}


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield the place and the expression of every query."""
    for board in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{board.stem}: {panel['title']}", target["expr"]


def alert_rules() -> list[dict[str, str]]:
    """Return the alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def tool(name: str) -> str | None:
    """Return the path of prometheus or promtool; None if it is not installed."""
    return shutil.which(name) or shutil.which(name, path=str(FETCHED))
