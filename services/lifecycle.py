"""Start and stop of every service.

Start: listen, then register (lease, health SERVING). Stop on SIGTERM or SIGINT: deregister (health NOT_SERVING), serve for
`shutdown_delay_s` those who do not know it yet, give running calls `graceful_shutdown_timeout_s`, end. A router then ends
calls that still run or wait with an error that says when to retry. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer

from eyas.config import DraftConfig, RouterConfig, ServerConfig, VerifierConfig, describe, load
from eyas.device.host import share_heaps, trim_heaps
from eyas.errors import ConfigError, EyasError
from eyas.rpc.channel import Peers
from eyas.rpc.convert import lease_to_proto
from eyas.rpc.messages import DraftClientStatus, Lease, Load, ModelInfo, Role
from eyas.rpc.server import RpcServer
from eyas.services.discovery.base import repeat
from eyas.services.discovery.redis_registry import Registry
from eyas.services.watchdog import Watchdog
from eyas.telemetry.logging import configure_logging
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name

# Seconds in which the clients of calls that a router ends read their errors.
ERROR_DELIVERY_S = 2.0

_WILDCARD_HOSTS = ("0.0.0.0", "[::]")
# Seconds between two returns of freed memory to the system.
TRIM_INTERVAL_S = 30.0
# The log line of a service that answers begins with this; `eyas serve` reads it there.
SERVING_PREFIX = "serving on "
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger(__name__)


class Registration(Protocol):
    """Announcement of a service that it is ready, and that it no longer is."""

    async def register(self, address: str) -> None:
        """Announce the service; called once the server listens on `address`."""
        ...

    async def deregister(self) -> None:
        """Take it back; called before the server drains, also if `register` failed."""
        ...


class Listener(Protocol):
    """Another server of a service, beside its gRPC server."""

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port or the files cannot be used."""
        ...

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give running ones `grace` seconds, then cancel them. May be called without `start`."""
        ...


class ServiceRunner(Protocol):
    """Process or replica in which a service runs: it asks the service to stop, and learns when it is ready."""

    def stop_requested(self) -> AbstractContextManager[asyncio.Event]:
        """Return an event that is set when the service is to stop, valid while the context is open."""
        ...

    def ready(self, address: str) -> None:
        """Act once the service is registered and listens on `address`."""
        ...


async def serve(
    server: RpcServer,
    service_names: Sequence[str],
    config: ServerConfig,
    registration: Registration,
    listeners: Sequence[Listener] = (),
    runner: ServiceRunner | None = None,
    end_calls: Callable[[], None] | None = None,
) -> None:
    """Serve until the runner (by default this process) requests a stop, or until cancelled; then drain and stop.

    end_calls: ends what still runs after the grace, with an error; None cuts it. Register servicers on `server.aio` before.
    Raises ConfigError when a port is taken.
    """
    runner = runner or ProcessRunner()
    with runner.stop_requested() as stop:
        address = await server.start(service_names)
        delay = 0.0
        try:
            for listener in listeners:
                await listener.start()
            await registration.register(address)
            runner.ready(address)
            await stop.wait()
            delay = config.shutdown_delay_s
            log.info("stopping; running calls have %.0f s to finish", config.graceful_shutdown_timeout_s)
        finally:
            await registration.deregister()
            await asyncio.sleep(delay)
            grace_s, ending = config.graceful_shutdown_timeout_s, None
            if end_calls:
                ending = asyncio.get_running_loop().call_later(grace_s, end_calls)
                grace_s += ERROR_DELIVERY_S
            stops = (server.stop, *(listener.stop for listener in listeners))
            await asyncio.gather(*(stop(grace_s) for stop in stops))
            if ending:
                ending.cancel()


def worker_server(config: ServerConfig, peers: Peers) -> RpcServer:
    """Return a server that accepts the calls of `peers` only. Warns if it accepts those of everybody who can reach it."""
    if not peers.identifies_clients and not is_loopback(config.host):
        log.warning(
            "OPEN TO EVERYBODY who can reach %s: calls need neither a token nor a client certificate. Set peers.token_file "
            "or peers.token_env on all services, or peers.cert_file, key_file and ca_file",
            config.host,
        )
    return RpcServer(config, peers.server_credentials, peers.check_metadata, peers.check_certificate)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`. False for a name other than localhost."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class AnnouncedWorker:
    """A verifier, or one drafter of a draft service.

    Attributes:
        load, prefix_hashes, draft_clients: their values now.
        zone, incarnation: see Lease.
    """

    role: Role
    model: ModelInfo
    load: Callable[[], Load]
    zone: str = ""
    prefix_hashes: Callable[[], frozenset[int]] = frozenset
    draft_clients: Callable[[], tuple[DraftClientStatus, ...]] = tuple
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)

    def lease(self, address: str) -> Lease:
        """Return the present state, as found at `address`."""
        state = self.load(), self.zone, self.prefix_hashes(), self.draft_clients()
        return Lease(self.role, address, self.incarnation, self.model, *state)


class WorkerRegistration(WorkerServicer):
    """Announcement of the workers of one process: health, the Worker service, and leases if there is a registry.

    Construct it before the server starts. registry: None if workers are found without leases.
    """

    def __init__(self, server: RpcServer, registry: Registry | None, *workers: AnnouncedWorker) -> None:
        self._server = server
        self._registry = registry
        self._workers = workers
        self._is_registered = False
        add_WorkerServicer_to_server(self, server.aio)

    async def register(self, address: str) -> None:
        """Answer health checks with SERVING and publish the leases. Raises ConfigError for a wildcard address."""
        host, _, _ = address.rpartition(":")
        if self._registry and host in _WILDCARD_HOSTS:
            raise ConfigError(
                f"server.host {host} listens everywhere; set server.advertise_host to the host others can dial"
            )
        self._is_registered = True
        await self._server.set_serving(True)
        if self._registry:
            await self._registry.publish(*(partial(worker.lease, address) for worker in self._workers))

    async def deregister(self) -> None:
        """Answer NOT_SERVING first, then withdraw the leases."""
        self._is_registered = False
        await self._server.set_serving(False)
        if self._registry:
            await self._registry.withdraw()
            await self._registry.close()

    async def set_serving(self, serving: bool) -> None:
        """Set the health of a registered service; the leases stay. Does nothing once it stops."""
        if self._is_registered:
            await self._server.set_serving(serving)

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:  # noqa: N802
        """Answer a probe: the workers here, and their load."""
        return lease_to_proto(*(worker.lease("") for worker in self._workers))


class ProcessRunner:
    """ServiceRunner for a process of its own: the first SIGTERM or SIGINT stops the service.

    The second one meets the default handler. Memory that is freed goes back to the system from time to time.
    stuck_exit_timeout_s: once ready, the process ends if its event loop has not run for so long; None watches nothing.
    """

    def __init__(self, stuck_exit_timeout_s: float | None = None) -> None:
        self._stuck_exit_timeout_s = stuck_exit_timeout_s
        self._watchdog: Watchdog | None = None

    @contextmanager
    def stop_requested(self) -> Iterator[asyncio.Event]:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def receive() -> None:
            restore()
            stop.set()

        def restore() -> None:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, receive)
        trim = partial(asyncio.to_thread, trim_heaps)
        trimming = loop.create_task(repeat(TRIM_INTERVAL_S, trim, TRIM_INTERVAL_S), name="trim heaps")
        try:
            yield stop
        finally:
            trimming.cancel()
            restore()
            if self._watchdog is not None:
                self._watchdog.stop()

    def ready(self, address: str) -> None:
        # What a service has loaded stays to its end. Each full garbage collection would visit it, 100 ms in a router.
        gc.collect()
        gc.freeze()
        if self._stuck_exit_timeout_s is not None:
            self._watchdog = Watchdog(asyncio.get_running_loop(), self._stuck_exit_timeout_s)
        log.info("%s%s", SERVING_PREFIX, address)


ConfigT = TypeVar("ConfigT", RouterConfig, VerifierConfig, DraftConfig)


def service_app(kind: type[ConfigT], run: Callable[[ConfigT], Coroutine[Any, Any, None]]) -> typer.Typer:
    """Return the command line of a service: `--config FILE --set key=value ...`.

    An EyasError prints one line on stderr and exits with status 2; a stop by signal exits with 0.
    """

    def command(
        config: Annotated[
            Path | None, typer.Option(help="YAML file with the settings; docs/configuration.md lists them.")
        ] = None,
        assignments: Annotated[
            list[str] | None,
            typer.Option("--set", help="One setting as key.sub=value, such as server.port=7000; may be repeated."),
        ] = None,
    ) -> None:
        """Run one service until SIGTERM or SIGINT."""
        share_heaps()
        faulthandler.enable(file=2)  # a crash in native code leaves the stacks of all threads on stderr
        configure_logging()
        try:
            settings = load(kind, config, assignments or ())
            configure_logging(settings.telemetry.log_format)
            for line in describe(settings):
                log.info("config %s", line)
            asyncio.run(run(settings))
        except EyasError as error:
            print("error:", *str(error).split(), file=sys.stderr)
            raise typer.Exit(2) from error

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app
