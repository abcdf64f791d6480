"""`eyas serve` as a user runs it: from a wheel in an empty folder, until Ctrl-C or until a service dies."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas import SamplingParams
from eyas.cli.main import app
from eyas.cli.options import service_settings
from eyas.errors import ConfigError, Unavailable
from eyas.services.local import cluster
from eyas.services.local.cluster import assign, free_port
from eyas.services.local.serve import plan, share_cores, with_keys
from tests.support.services.forks import Popen
from tests.support.services.grpc_client import generate

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
TARGET = str(DEMO / "target")
PROMPT = "x = 1\nx = 1\nx = 1\n"  # prompt lookup finds its end again
READY = re.compile(r"ready (\w+) on 127\.0\.0\.1:(\d+)")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
SOURCES = ("eyas", "services", "pyproject.toml", "README.md", "LICENSE")
SIGNALLED = """
import os, signal, sys
from rich.console import Console
from eyas.services.local.serve import exit_on_error
for ignored, sent in zip(sys.argv[1::2], sys.argv[2::2]):
    if not os.fork():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.Signals[ignored], signal.SIG_IGN)
        with exit_on_error(Console()):
            signal.raise_signal(signal.Signals[sent])
            print("goes on")
        sys.exit()
    os.wait()
"""
WHERE = "from importlib.util import find_spec; print(find_spec('eyas.services.local.serve').origin)"
BUILD = "from setuptools.build_meta import build_{kind} as build; build('..')"


@dataclass(frozen=True)
class Server:
    """A running `eyas serve`. output: what it printed until it was ready."""

    process: "subprocess.Popen[str]"
    output: str
    http: str
    grpc: str

    @property
    def ports(self) -> dict[str, int]:
        return {name: int(port) for name, port in READY.findall(self.output)}

    def complete(self, model: str) -> str:
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{self.http}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as answer:
            return str(json.load(answer)["choices"][0]["text"])


@contextmanager
def serving(command: list[str], folder: Path, env: Mapping[str, str], *options: str) -> Iterator[Server]:
    """Run `eyas serve` in `folder` until it says that it serves; stop it at the end."""
    http, grpc = free_port(), free_port()
    command = [*command, "serve", TARGET, "--port", f"{http}", "--grpc-port", f"{grpc}", *options]
    process = Popen(
        command, cwd=folder, env={**env, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("Serving ")):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr and process.stderr.read()
        yield Server(process, "".join(lines), f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    finally:
        process.terminate()
        process.communicate(timeout=100)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def build(kind: str, sources: Path) -> Path:
    """Build a wheel or an sdist from a source tree, into the folder above it."""
    before = set(sources.parent.iterdir())
    command = [sys.executable, "-c", BUILD.format(kind=kind)]
    subprocess.run(command, cwd=sources, check=True, capture_output=True, timeout=100)
    (built,) = set(sources.parent.iterdir()) - before
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, where eyas/services is the same link as in the checkout."""
    sources = tmp_path_factory.mktemp("wheel") / "sources"
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources)
    return build("wheel", sources)


@pytest.fixture(scope="module")
def eyas(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `eyas` command of an environment with the wheel, which borrows the packages of this one."""
    venv = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    options = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), *options, str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=60)
    for source in ROOT.glob("eyas/kernels/cpu/*.py"):  # numba takes kernels for compiled that are of the same time
        times = source.stat()
        os.utime(packages / source.relative_to(ROOT), ns=(times.st_atime_ns, times.st_mtime_ns))
    for kernel in ROOT.glob("eyas/kernels/cpu/__pycache__/*.nb?"):
        shutil.copy2(kernel, packages / kernel.relative_to(ROOT))
    return venv / "bin" / "eyas"


@pytest.mark.nightly
def test_a_wheel_serves_from_an_empty_folder(eyas: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    where = [str(eyas.parent / "python"), "-c", WHERE]
    module = subprocess.run(where, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=60).stdout
    assert Path(module).is_relative_to(eyas.parents[1])
    settings = ("verifier.engine.draft_budget=fixed", "verifier.threads=1")
    options = ("--method", "prompt_lookup", *(word for setting in settings for word in ("--set", setting)))
    with serving([str(eyas)], tmp_path, env, *options) as server:
        assert set(server.ports) == {"verifier", "router"}
        with urllib.request.urlopen(f"{server.http}/", timeout=100) as page:
            assert "<title>Eyas playground</title>" in page.read().decode()
        assert f"playground: {server.http}/" in server.output
        of_this_machine = urllib.request.Request(f"{server.http}/v1/models", headers={"Origin": "http://localhost:5173"})
        with urllib.request.urlopen(of_this_machine, timeout=100) as answer:
            assert answer.headers["access-control-allow-origin"] == "http://localhost:5173"
        text = server.complete(TARGET)
        options = ("--temperature", "0", "--max-tokens", "8", "--json")
        command = [str(eyas), "generate", PROMPT, "--address", server.grpc, *options]
        greedy = SamplingParams(max_tokens=8, temperature=0)
        while not generate(server.grpc, PROMPT, greedy).stats.num_drafted:
            time.sleep(0.1)  # the verifier may find its drafter after its first requests
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60)
        *chunks, final = map(json.loads, done.stdout.splitlines())
        assert "".join(chunk["text"] for chunk in chunks) == text
        assert final["stats"]["num_drafted"] > 0
        server.process.send_signal(signal.SIGINT)
        server.process.wait(100)
    assert server.process.returncode == 0
    assert not any(map(is_open, server.ports.values()))
    assert not list(tmp_path.glob("eyas-*"))


@pytest.mark.nightly
def test_an_sdist_holds_the_services(wheel: Path) -> None:
    archive = build("sdist", wheel.parent / "sources")
    shutil.unpack_archive(archive, wheel.parent / "unpacked", filter="data")
    (unpacked,) = (wheel.parent / "unpacked").iterdir()

    def names(folder: Path) -> set[str]:
        found = (path for pattern in ("*.py", "*.html", "static/*") for path in folder.rglob(pattern))
        return {path.relative_to(folder).as_posix() for path in found}

    assert names(unpacked / "eyas/services") == names(ROOT / "services")


def child_pids(pid: int, service: str) -> list[int]:
    """The children that write to the service's log."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if Path(f"/proc/{child}/fd/1").readlink().name == f"{service}.log"]


@pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc")
def test_serve_restarts_drafts_and_ends_with_the_verifier(tmp_path: Path) -> None:
    options = ("--method", "prompt_lookup", "--draft-placement", "service", "--served-model-name", "demo")
    with serving([sys.executable, "-m", "eyas.cli"], tmp_path, ENVIRONMENT, *options) as server:
        text = server.complete("demo")
        (draft,) = child_pids(server.process.pid, "draft")
        os.kill(draft, signal.SIGKILL)
        assert server.complete("demo") == text
        assert server.process.stdout is not None
        while not server.process.stdout.readline().startswith("starting it again"):
            assert server.process.poll() is None
        assert server.complete("demo") == text
        while "is ready again" not in server.process.stdout.readline():
            assert server.process.poll() is None
        (verifier,) = child_pids(server.process.pid, "verifier")
        os.kill(verifier, signal.SIGKILL)
        _, errors = server.process.communicate(timeout=100)
    assert server.process.returncode == 1
    (logs,) = tmp_path.glob("eyas-*")
    reason = "verifier was killed (SIGKILL), perhaps for lack of memory"
    assert errors == f"error: {reason}; its log is {logs / 'verifier.log'}\n"
    assert not any(map(is_open, server.ports.values()))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc")
def test_a_batch_goes_on_when_its_drafter_dies(tmp_path: Path) -> None:
    file, command = tmp_path / "batch.jsonl", [sys.executable, "-m", "eyas.cli", "run-batch"]
    body = {"model": TARGET, "prompt": PROMPT, "max_tokens": 200, "temperature": 0.9, "ignore_eos": True}
    file.write_text(
        "".join(
            json.dumps({"custom_id": f"r{seed}", "url": "/v1/completions", "body": {**body, "seed": seed}}) + "\n"
            for seed in range(24)
        )
    )
    options = ["--model", TARGET, "--draft-model", str(DEMO / "eagle3-full"), "--concurrency", "2"]
    output = tmp_path / "batch.out.jsonl"
    process = Popen(
        [*command, str(file), *options], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while process.poll() is None and not (output.exists() and output.read_text().count("\n")):
            time.sleep(0.05)
        (killed,) = child_pids(process.pid, "draft")
        os.kill(killed, signal.SIGKILL)
        said, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "24 answered, 0 failed" in said
    assert "draft was killed" in errors
    assert "starting it again; plain decoding goes on" in errors


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", TARGET, "--port", f"{port}"])
    assert (result.exit_code, result.output) == (1, f"error: port {port} is in use; choose another with --port\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--port", "65536"], "less than or equal to 65535"),
        (["--grpc-port", "0"], "greater than or equal to 1"),
        (["--port", "8001", "--grpc-port", "8001"], "--port and --grpc-port are both 8001; choose two ports"),
    ],
)
def test_ports_that_cannot_be_served_are_refused(options: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["serve", TARGET, *options])
    assert isinstance(result.exception, SystemExit)
    assert reason in " ".join(re.sub(r"\x1b\[[\d;]*m|│", "", result.output).split())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "name the MODEL to serve, or try the demo model of a checkout: eyas serve --demo"),
        (["--demo", "--draft-model", "head"], "--draft-model needs a MODEL: --demo alone serves the demo model"),
        (["--demo", "--num-draft-tokens", "4"], "--num-draft-tokens needs a MODEL"),
        ([TARGET, "--demo"], "--demo kills and restarts a draft service, and none is started"),
        (["--demo", "--host", "0.0.0.0"], "it serves this machine only, not --host 0.0.0.0"),
    ],
)
def test_a_demo_that_cannot_be_is_refused(options: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 1
    assert reason in result.output


def test_a_drafter_killed_on_request_always_comes_back(tmp_path: Path) -> None:
    """More often than one that dies by itself, whose deaths end the cluster."""
    children = [cluster.Child(name, "", ["sleep", "600"], tmp_path / name, tmp_path) for name in ("redis", "draft")]
    running, reasons = cluster.Cluster(children, ""), list[str]()

    def kill() -> None:
        while len(reasons) < 6:
            running.kill_drafter()
            time.sleep(0.05)
        children[0].process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(Unavailable, match="redis was killed"):
        running.watch(reasons.append)
    killing.join()
    children[1].process.kill()
    children[1].process.wait()
    assert len(reasons) >= 6 > cluster.MAX_DRAFT_RESTARTS
    assert all("was killed from the playground" in reason for reason in reasons)


def test_which_signals_end_serve() -> None:
    """In a background job, in a terminal that is closed, and under nohup: which one it ignores, and what is sent."""
    pairs = ("SIGINT", "SIGINT", "SIGUSR1", "SIGHUP", "SIGHUP", "SIGHUP")
    command = [sys.executable, "-c", SIGNALLED, *pairs]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "stopped\nstopped\ngoes on\n"


def test_without_a_verifier_a_router_does_not_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.1)
    commands = {"redis": "sleep 60", "verifier": "exit 1", "router": "trap '' TERM; echo ready; exec sleep 20"}
    children = [
        cluster.Child(name, "", ["sh", "-c", command], tmp_path / name, tmp_path, 60.0) for name, command in commands.items()
    ]
    children[1].process.wait()
    while not children[2].last_log_lines(1):
        time.sleep(0.01)
    cluster.stop_children(children)
    assert children[2].process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("draft_model", "method", "names", "verifier_method"),
    [
        ("", "", ["verifier", "router"], "none"),
        ("", "lookahead", ["verifier", "router"], "lookahead"),
        ("", "prompt_lookup+suffix", ["verifier", "router"], "prompt_lookup+suffix"),
        ("store", "rest", ["draft", "verifier", "router"], "rest"),
        ("head", "", ["draft", "verifier", "router"], ""),
        ("head", "medusa", ["draft", "verifier", "router"], "medusa"),
        ("head", "eagle3+suffix", ["draft", "verifier", "router"], "eagle3+suffix"),
    ],
)
def test_a_method_decides_what_is_started(draft_model: str, method: str, names: list[str], verifier_method: str) -> None:
    services = plan(TARGET, draft_model, method, settings=service_settings({"num_steps": 3, "top_k": None}))
    assert [service.name for service in services] == names
    for service in services[:-1]:
        assert f'method="{verifier_method}"' in service.assignments
        assert "tree.num_steps=3" in service.assignments
        assert service.load()


def test_keys_reach_the_router_by_its_environment_alone() -> None:
    services = with_keys(plan("model", method="none"), ["one", "two"])
    shown = [word for service in services for word in service.command()]
    assert not [word for word in shown if "two" in word]
    assert {each.name: set(each.environment.values()) for each in services} == {"verifier": set(), "router": {"one,two"}}
    with pytest.raises(ConfigError, match="--api-key has 1 keys that are empty or hold a comma"):
        with_keys(services, ["a,b"])


@pytest.mark.parametrize(("cores", "draft", "verifier"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (16, 4, 12)])
def test_draft_service_and_verifier_share_the_cores(cores: int, draft: int, verifier: int) -> None:
    assert share_cores(cores) == (draft, verifier)


def test_a_setting_of_a_service_that_is_not_started_is_refused() -> None:
    services = plan("model", method="none")
    with pytest.raises(ConfigError, match="no service 'draft' is started"):
        assign(services, ["draft.threads=1"])
    for setting in ("engine.max_num_seqs=4", "threads=2"):
        with pytest.raises(ConfigError, match=rf"did you mean verifier\.{setting}\?"):
            assign(services, [setting])
