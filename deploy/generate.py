"""`python -m deploy.generate`: writes what the chart holds twice: its schema, its table of values, dashboards and alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.schema import values_schema

DEPLOY = Path(__file__).parent
CHART = DEPLOY / "helm"
DASHBOARDS = DEPLOY / "dashboards"

START, END = "<!-- values -->\n", "<!-- end -->"
KEY = re.compile(r"^( *)([\w.]+):")
LONGEST = 60


@dataclass(frozen=True)
class Row:
    """A line of the table: a setting, its default as JSON, what it means."""

    key: str
    default: str
    meaning: str


def generated() -> Mapping[Path, str]:
    """Every generated file and what must stand in it."""
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    head, _, rest = readme.partition(START)
    tail = rest.partition(END)[2]
    schema = json.dumps(values_schema(), indent=1) + "\n"
    files = {CHART / "README.md": head + START + table() + END + tail, CHART / "values.schema.json": schema}
    sources = sorted([*DASHBOARDS.glob("*.json"), *DASHBOARDS.glob("alerts.yaml")])
    return files | {CHART / "files" / source.name: source.read_text(encoding="utf-8") for source in sources}


def table() -> str:
    """The settings of values.yaml, in its order."""
    lines = [f"| `{row.key}` | `{row.default}` | {row.meaning} |" for row in rows()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *lines, ""])


def rows() -> Iterator[Row]:
    """A row for each comment that begins with `--`: what follows it is a setting."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values, meaning = yaml.safe_load(text), ""
    path: list[str] = []
    for line in text.splitlines():
        comment = line.strip().removeprefix("#").strip()
        if line.strip().startswith("# --"):
            meaning = comment.removeprefix("--").strip()
        elif line.strip().startswith("#"):
            meaning = meaning and f"{meaning} {comment}"
        elif found := KEY.match(line):
            path = [*path[: len(found[1]) // 2], found[2]]
            if meaning:
                yield Row(".".join(path), _shown(_value(values, path)), meaning)
            meaning = ""


def _value(values: Any, path: list[str]) -> Any:
    for key in path:
        values = values[key]
    return values


def _shown(value: Any) -> str:
    text = json.dumps(value).replace("|", "\\|")
    return text if len(text) <= LONGEST else "see values.yaml"


def main() -> None:
    """Write every generated file that is not as it must be."""
    for file, text in generated().items():
        file.parent.mkdir(exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file.relative_to(DEPLOY.parent)}")


if __name__ == "__main__":
    main()
