"""Dated reports of measurements, as a markdown page and a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from eyas import __version__

VERSIONED = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Spread:
    """Repeated measurements: their median and range."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(median(values), min(values), max(values), tuple(values))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


@dataclass(frozen=True)
class Machine:
    """The machine that was measured. gpu: empty for a run on the CPU."""

    processor: str
    num_cores: int
    gpu: str
    system: str

    @property
    def label(self) -> str:
        """The device, as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-") or "cpu"


@dataclass(frozen=True)
class Table:
    """A titled table of text. note: what its numbers mean."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """Return the table as a section of a report."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join(part for part in (f"## {self.title}", self.note, body) if part)


@dataclass(frozen=True)
class Report:
    """A finished measurement.

    Attributes:
        name: what was measured, part of the file name.
        settings, results: dataclasses or plain values, written to JSON as they are.
        tables: the page, for people.
    """

    name: str
    command: str
    machine: Machine
    versions: Mapping[str, str]
    commit: str
    settings: Any
    results: Any
    tables: Sequence[Table]
    day: date

    @classmethod
    def here(cls, name: str, program: str, device: str, settings: Any, results: Any, tables: Sequence[Table]) -> Report:
        """Make a report of today, this machine and this checkout.

        Args:
            program: the command without the arguments of this process.
            device: as torch names it.
        """
        command = f"{program} {shlex.join(sys.argv[1:])}".strip()
        versions = {"python": platform.python_version(), "eyas": __version__} | {name: version(name) for name in VERSIONED}
        return cls(name, command, _machine(device), versions, checkout_commit(), settings, results, tables, date.today())

    def markdown(self) -> str:
        """Return the page, for people."""
        machine = [self.machine.processor, f"{self.machine.num_cores} cores", self.machine.gpu, self.machine.system]
        facts = {
            "date": f"{self.day}",
            "machine": ", ".join(part for part in machine if part),
            "versions": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
            "commit": self.commit,
            "command": f"`{self.command}`",
            "settings": ", ".join(f"{key} {_short(value)}" for key, value in _plain(self.settings).items()),
        }
        head = "\n".join(f"- {key}: {value}" for key, value in facts.items())
        return "\n\n".join([f"# Benchmark: {self.name}", head, *(table.markdown() for table in self.tables)]) + "\n"

    def json(self) -> str:
        """Everything but the tables, for machines."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "tables"}
        return json.dumps(_plain(data), indent=1) + "\n"

    def write(self, folder: Path) -> Path:
        """Write both files and return the path of the page. Earlier reports of the day stay."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.day}-{self.name}-{self.machine.label}"
        stems = (stem if n == 1 else f"{stem}-{n}" for n in count(1))
        page = next(page for each in stems if not (page := folder / f"{each}.md").exists())
        page.write_text(self.markdown(), encoding="utf-8")
        page.with_suffix(".json").write_text(self.json(), encoding="utf-8")
        return page

    def publish(self, folder: Path) -> Path:
        """Print the page, write both files, and return the path of the page."""
        print(self.markdown())
        page = self.write(folder)
        print(f"written to {page} and {page.with_suffix('.json')}")
        return page


def number(value: float) -> str:
    """Three significant digits, or all digits before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _machine(device: str) -> Machine:
    gpu = ""
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.get_device_name(device)
    return Machine(processor_name(), os.cpu_count() or 1, gpu, f"{platform.system()} {platform.machine()}")


def checkout_commit() -> str:
    """Return the commit of this checkout, marked if files differ from it; "unknown" outside a checkout."""
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def processor_name() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _plain(value: Any) -> Any:
    """Convert to values that JSON can hold; floats keep six digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value if isinstance(value, (int, str, bool)) or value is None else str(value)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_short(item)}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else f"{value}"
