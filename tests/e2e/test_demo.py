"""The local cluster as a user starts it: the demo's result, and no process is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eyas.services.local.cluster import free_port
from tests.e2e.test_serve import is_open
from tests.support.services.forks import Popen
from tests.support.tiers import nightly

# A drafter without a model, for tests of processes only.
SETTINGS = (
    *(f"{service}.{setting}" for service in ("draft", "verifier") for setting in ("method=prompt_lookup", "draft_model=''")),
    "verifier.draft_placement=service",
)
LIGHT = tuple(word for setting in SETTINGS for word in ("--set", setting))
READY = re.compile(r"ready \w+ on 127\.0\.0\.1:(\d+)")


@contextmanager
def local(logs: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A process of `make demo`, or of `eyas serve --demo`."""
    own = ("--port", str(free_port()), "--grpc-port", str(free_port())) if arguments[0] == "serve" else ()
    module = "eyas.cli" if arguments[0] == "serve" else "benchmarks.scripts.demo"
    command = [sys.executable, "-m", module, *arguments, *own]
    environment = os.environ | {"TMPDIR": str(logs)}
    process = Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def ports_of(process: "subprocess.Popen[str]") -> list[int]:
    """The ports of the three services, once all are ready and the line about Ctrl-C is printed."""
    assert process.stdout is not None
    output = ""
    while "Ctrl-C stops it" not in output:
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        output += line
    return [int(port) for port in READY.findall(output)]


def until_closed(ports: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_open, ports)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_open, ports))


@pytest.mark.nightly
def test_the_demo_outputs_are_equal_and_no_process_is_left(tmp_path: Path) -> None:
    settings = ("verifier.draft_client.draft_timeout_s=30", "verifier.validate_head=never")
    options = ("--num-prompts", "2", "--max-tokens", "24", *(word for setting in settings for word in ("--set", setting)))
    with local(tmp_path, *options) as process:
        output, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    assert "yes, 2 of 2" in output
    assert "speedup" in output
    assert not any(map(is_open, map(int, READY.findall(output))))
    assert not list(tmp_path.glob("eyas-*"))


@pytest.mark.nightly
def test_a_second_ctrl_c_leaves_nothing_behind_either(tmp_path: Path) -> None:
    with local(tmp_path, "serve", "--demo", *LIGHT) as process:
        ports = ports_of(process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
        until_closed(ports)


@pytest.mark.parametrize(("number", "status"), [nightly(signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_the_cluster_ends_with_its_owner(tmp_path: Path, number: signal.Signals, status: int) -> None:
    if number is signal.SIGKILL and sys.platform != "linux":
        pytest.skip("children learn of a killed parent on Linux only")
    with local(tmp_path, "serve", "--demo", *LIGHT) as process:
        ports = ports_of(process)
        assert all(map(is_open, ports))
        process.send_signal(number)
        process.communicate(timeout=100)
        assert len(ports) == 3
        until_closed(ports)
    assert process.returncode == status
