"""A process whose interpreter does not run is ended, says why, and is left alone while a person has stopped it."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.services import start

TIMEOUT_S = 3.0
MODEL, HEAD = "models/demo/target", "models/demo/eagle3"
WORKER = [f"model={MODEL}", "served_model_name=demo", "device=cpu", f"stuck_step_exit_timeout_s={TIMEOUT_S}"]
SETTINGS = {
    "router": [f"models=[{{name: demo, tokenizer: {MODEL}}}]", f"stuck_loop_exit_timeout_s={TIMEOUT_S}"],
    "verifier": [*WORKER, "stuck_step_timeout_s=1", "method=none"],
    "draft": [*WORKER, f"draft_model={HEAD}"],
}
COMMON = ["discovery.kind=static", "registry.url=''"]
# Serves nothing, and freezes as the argument says.
PROGRAM = """
import asyncio, sys
from eyas.services.lifecycle import ProcessRunner
from tests.chaos.freezing import block_the_loop, hold_the_lock

async def main():
    runner = ProcessRunner(float(sys.argv[1]))
    with runner.stop_requested() as stop:
        runner.ready("here")
        print("ready", flush=True)
        if sys.argv[2] == "thread":
            await asyncio.to_thread(hold_the_lock)
        elif sys.argv[2] == "loop":
            block_the_loop()
        await stop.wait()

asyncio.run(main())
"""


def program(how: str) -> subprocess.Popen[str]:
    """Start the program and wait until it is watched."""
    command = [sys.executable, "-c", PROGRAM, str(TIMEOUT_S), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def can_unshare() -> bool:
    """Return whether a process may be the first one of a namespace here."""
    with suppress(OSError):
        return subprocess.run(["unshare", "-Urpf", "true"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not can_unshare(), reason="needs unshare of util-linux, and the right to make a PID namespace")
def test_the_first_process_of_a_container_ends_too() -> None:
    command = ["unshare", "-Urpf", "--kill-child", sys.executable, "-c", PROGRAM, str(TIMEOUT_S), "thread"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == signal.SIGALRM
    assert "hold_the_lock" in result.stderr


@pytest.mark.parametrize(("how", "function"), [("thread", "hold_the_lock"), ("loop", "block_the_loop")])
def test_a_held_interpreter_ends_with_its_stacks(how: str, function: str) -> None:
    with program(how) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGALRM
    assert f"has not run its event loop for {TIMEOUT_S:g} s" in errors
    assert f"in {function}" in errors


def test_a_stopped_process_is_not_ended() -> None:
    with program("never") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(TIMEOUT_S)
        assert process.poll() is None
        watchers = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "CRITICAL" not in process.communicate()[1]
    assert len(watchers) == 1
    assert not Path(f"/proc/{watchers[0]}").exists()


def test_a_watcher_that_ends_is_replaced() -> None:
    with program("never") as process:
        (first,) = children(process.pid)
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (watchers := children(process.pid)) in ([], [first]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert len(watchers) == 1
    assert "the process that watches this one has ended" in errors


def test_the_watcher_ends_with_a_killed_process() -> None:
    with program("never") as process:
        (watcher,) = children(process.pid)
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 60
    while is_running(watcher):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.nightly
def test_every_service_ends_when_its_interpreter_is_held(tmp_path: Path) -> None:
    running = {}
    try:
        for kind, settings in SETTINGS.items():
            words = [part for setting in (*settings, *COMMON) for part in ("--set", setting)]
            running[kind] = start(kind, words, tmp_path / kind)
        for kind, process in running.items():
            wait_for_line(tmp_path / kind, "serving on", process)
        for process in running.values():
            process.send_signal(signal.SIGUSR1)
        for kind, process in running.items():
            assert process.wait(60) == -signal.SIGALRM, kind
            assert re.search(r"CRITICAL watchdog: [^$]* in hold_the_lock\n", (tmp_path / kind).read_text()), kind
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def wait_for_line(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    while not log.exists() or text not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie, which an init that does not reap may keep."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
