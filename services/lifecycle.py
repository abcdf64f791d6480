"""How every service starts and stops: config in, an exit status out. Knows nothing of what a service does.

Start: listen, become present (lease, SERVING). Stop on SIGTERM or SIGINT: NOT_SERVING, withdraw, linger for those who have
not heard of it, let running calls finish for `graceful_shutdown_timeout_s`, leave. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

import typer

from eyas.config import ServerConfig, TelemetryConfig, describe, load
from eyas.errors import ConfigError, EyasError
from eyas.rpc.convert import lease_to_proto
from eyas.rpc.messages import Lease, Load, ModelInfo, Role
from eyas.rpc.server import RpcServer
from eyas.services.discovery.registry import Registry
from eyas.telemetry.logging import configure_logging
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server


class ServiceConfig(Protocol):
    """What the settings of every service hold."""

    @property
    def telemetry(self) -> TelemetryConfig:
        """How it tells of itself."""
        ...


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)

log = logging.getLogger(__name__)

WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name

_EVERYWHERE = ("0.0.0.0", "[::]")


class Registration(Protocol):
    """How a service tells others that it is ready, and that it no longer is."""

    async def enter(self, address: str) -> None:
        """Called once the server listens on `address`."""
        ...

    async def leave(self) -> None:
        """Called before the server drains, also where `enter` failed; others send no new work once they hear of it."""
        ...


class Listener(Protocol):
    """Another way in, beside a service's gRPC server."""

    async def start(self) -> None:
        """Listen. Raises ConfigError where it cannot."""
        ...

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give running ones `grace` seconds, then cancel them. May be called without `start`."""
        ...


class ServiceRunner(Protocol):
    """Where a service lives: what tells it to stop, and who hears that it is ready."""

    def stopping(self) -> AbstractContextManager[asyncio.Event]:
        """An event that is set once the service is to stop; heeded as long as the context is open."""
        ...

    def entered(self, address: str) -> None:
        """Called once the service is present and listens on `address`."""
        ...


class ProcessRunner:
    """A process of its own: the first SIGTERM or SIGINT stops the service."""

    def stopping(self) -> AbstractContextManager[asyncio.Event]:
        return _StopSignal()

    def entered(self, address: str) -> None:
        log.info("serving on %s", address)


PROCESS = ProcessRunner()


@dataclass(frozen=True)
class WorkerRegistration:
    """A verifier or draft service: SERVING, telling its state to those who ask, and with a lease where there is a registry.

    Construct it before the server starts. registry: None where others find workers without one. zone, prefixes: see Lease.
    beside: of the first worker of the process; None for the first itself, which enters and leaves for all of them, and tells
    whoever asks of all.
    """

    server: RpcServer
    registry: Registry | None
    role: Role
    model: ModelInfo
    load: Callable[[], Load]
    zone: str = ""
    prefixes: Callable[[], frozenset[int]] = frozenset
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    beside: WorkerRegistration | None = None
    _told: list[WorkerRegistration] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first = self.beside or self
        first._told.append(self)
        if first is self:
            add_WorkerServicer_to_server(_Worker(self._told), self.server.aio)

    def lease(self, address: str) -> Lease:
        """The present state, as found at `address`."""
        return Lease(self.role, address, self.incarnation, self.model, self.load(), self.zone, self.prefixes())

    async def enter(self, address: str) -> None:
        """Answer health checks with SERVING and publish the leases. Raises ConfigError if nobody can dial `address`."""
        host, _, _ = address.rpartition(":")
        if self.registry and host in _EVERYWHERE:
            raise ConfigError(
                f"server.host {host} listens everywhere; set server.advertise_host to the host others can dial"
            )
        await self.server.set_serving(True)
        if self.registry:
            await self.registry.publish(*(partial(each.lease, address) for each in self._told))

    async def leave(self) -> None:
        """Answer NOT_SERVING first, then take the leases back."""
        await self.server.set_serving(False)
        if self.registry:
            await self.registry.withdraw()
            await self.registry.close()


class _Worker(WorkerServicer):
    """The state of the workers of this process, for those who ask it itself."""

    def __init__(self, presences: Sequence[WorkerRegistration]) -> None:
        self._presences = presences

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:  # noqa: N802
        """Who is there, and how busy."""
        return lease_to_proto(*(presence.lease("") for presence in self._presences))


async def serve(
    server: RpcServer,
    service_names: Sequence[str],
    config: ServerConfig,
    presence: Registration,
    doors: Sequence[Listener] = (),
    host: ServiceRunner = PROCESS,
) -> None:
    """Listen until the host says stop (or cancellation), then drain and stop, the other doors at the same time.

    Servicers are registered on `server.aio` before. Raises ConfigError when a port is taken.
    """
    with host.stopping() as stop:
        address = await server.start(service_names)
        linger = 0.0
        try:
            for door in doors:
                await door.start()
            await presence.enter(address)
            host.entered(address)
            await stop.wait()
            linger = config.shutdown_delay_s
            log.info("stopping; running calls have %.0f s to finish", config.graceful_shutdown_timeout_s)
        finally:
            await presence.leave()
            await asyncio.sleep(linger)
            stops = (server.stop, *(door.stop for door in doors))
            await asyncio.gather(*(stop(config.graceful_shutdown_timeout_s) for stop in stops))


def service_app(kind: type[ConfigT], run: Callable[[ConfigT], Coroutine[Any, Any, None]]) -> typer.Typer:
    """Command line of a service: `--config FILE --set key=value ...`.

    An EyasError prints one line on stderr and exits with status 2; a stop by signal exits with 0.
    """

    def command(
        config: Annotated[Path | None, typer.Option(help="YAML file with the settings.")] = None,
        assignments: Annotated[list[str] | None, typer.Option("--set", help="key.sub=value; may be repeated.")] = None,
    ) -> None:
        """Run this service until SIGTERM or SIGINT."""
        configure_logging()
        try:
            settings = load(kind, config, assignments or ())
            configure_logging(settings.telemetry.log_format)
            for line in describe(settings):
                log.info("config %s", line)
            asyncio.run(run(settings))
        except EyasError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from error

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app


class _StopSignal(asyncio.Event):
    """Set by the first SIGTERM or SIGINT; the second one meets the default handler."""

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        self._restore()

    def _receive(self) -> None:
        self._restore()
        self.set()

    def _restore(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
