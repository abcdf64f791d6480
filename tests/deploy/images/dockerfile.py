"""Run the steps of a Dockerfile without a container engine; a folder stands for the root of each stage.

Commands run on this machine, with the paths of the container rewritten to the folder. FROM uses this interpreter, apt-get
and USER do nothing, pip compiles nothing. Packages in `linked` are links to those of this environment, to avoid copies of
gigabytes.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.repository import ROOT

FOLDERS = ("/src", "/venv", "/app")
SKIPPED = ("apt-get",)


@dataclass(frozen=True)
class Step:
    """One instruction and its arguments."""

    instruction: str
    text: str


def steps(file: Path) -> list[Step]:
    """Return the instructions in order, without comments, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [Step(words[0].upper(), words[1] if len(words) > 1 else "") for words in lines]


def of(file: Path, instruction: str) -> list[str]:
    return [step.text for step in steps(file) if step.instruction == instruction]


def sources(text: str) -> list[str]:
    """Return the sources of a COPY from the repository; empty if it copies from a stage."""
    words = shlex.split(text)
    return [] if words[0].startswith("--from") else words[:-1]


@dataclass
class Machine:
    """Runs the steps of a Dockerfile below `root`."""

    root: Path
    linked: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    workdir: str = "/"

    def build(self, file: Path) -> None:
        for step in steps(file):
            getattr(self, f"_{step.instruction.lower()}", lambda text: None)(step.text)

    def here(self, text: str) -> str:
        """Return the text with the container's paths rewritten to this machine."""
        return re.sub(rf"(?<![\w.}}])({'|'.join(FOLDERS)})(?=[/:\s\"']|$)", lambda found: f"{self.root}{found[0]}", text)

    def start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command as CMD would, isolated from this process's packages."""
        known = ("PATH", "LANG", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in self.environment.items() if name in known}
        with log.open("wb") as output:
            program = str(self.root / "venv" / "bin" / command[0])
            folder, environment = self.root / self.workdir.strip("/"), {**kept, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen([program, *command[1:]], cwd=folder, env=environment, stdout=output, stderr=output)

    def packages(self) -> set[str]:
        """Return the names of the packages that pip has installed."""
        (folder,) = (self.root / "venv").glob("lib/python*/site-packages")
        return {path.name.split("-")[0].lower() for path in folder.glob("*.dist-info")}

    def _from(self, text: str) -> None:
        before = self.root.with_name(f"{self.root.name}-build")
        if self.root.exists():
            shutil.rmtree(before, ignore_errors=True)
            self.root.rename(before)
        self.root.mkdir(parents=True)
        self.environment, self.workdir = dict(os.environ), "/"
        self.environment.pop("PYTHONPATH", None)
        self.environment["PIP_NO_COMPILE"] = "1"

    def _arg(self, text: str) -> None:
        name, _, value = text.partition("=")
        self.environment.setdefault(name, shlex.split(value)[0] if value else "")

    def _env(self, text: str) -> None:
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            self.environment[name] = self.here(value).replace("$PATH", self.environment["PATH"])

    def _workdir(self, text: str) -> None:
        self.workdir = text
        (self.root / text.strip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        words = shlex.split(text)
        if words[0].startswith("--from"):
            built = self.root.with_name(f"{self.root.name}-build")
            (built / words[1].strip("/")).rename(self.root / words[2].strip("/"))
            return
        folder = self.root / self.workdir.strip("/")
        for source in words[:-1]:
            origin, target = ROOT / source, folder / words[-1]
            if origin.is_dir():
                shutil.copytree(origin, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, target)

    def _run(self, text: str) -> None:
        if text.startswith(SKIPPED):
            return
        command = re.sub(r"^python\b", shlex.quote(sys.executable), self.here(text))
        folder = self.root / self.workdir.strip("/")
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if "-m venv" in text:
            self._link(self.root / text.split()[-1].strip("/"))

    def _link(self, venv: Path) -> None:
        """Make the packages in `linked` importable in the new environment, with their metadata."""
        folder = self.root.with_name("linked")
        folder.mkdir(exist_ok=True)
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if re.sub(r"-[^-]*\.dist-info$", "", path.name) in self.linked and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        (packages,) = venv.glob("lib/python*/site-packages")
        (packages / "linked.pth").write_text(f"{folder}\n")


def command(file: Path, instruction: str) -> list[str]:
    """Return the words of the last CMD, or of the command of HEALTHCHECK."""
    text = of(file, instruction)[-1]
    words = json.loads(text[text.index("[") :])
    assert isinstance(words, list)
    return words
