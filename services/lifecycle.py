"""How every service starts and stops: config in, an exit status out. Knows nothing of what a service does.

Start: listen, become present (lease, SERVING). Stop on SIGTERM or SIGINT: NOT_SERVING, withdraw, linger for those who have
not heard of it, let running calls finish for `drain_seconds`, leave. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

import typer

from eyas.config import ServerConfig, describe, load
from eyas.errors import ConfigError, EyasError
from eyas.rpc.messages import Lease, Load, ModelInfo, Role
from eyas.rpc.server import RpcServer
from eyas.rpc.worker_wire import status_to_message
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from services.registry import Registry

ConfigT = TypeVar("ConfigT")

log = logging.getLogger(__name__)

WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name

_EVERYWHERE = ("0.0.0.0", "[::]")


class Presence(Protocol):
    """How a service tells others that it is ready, and that it no longer is."""

    async def enter(self, address: str) -> None:
        """Called once the server listens on `address`."""
        ...

    async def leave(self) -> None:
        """Called before the server drains, also where `enter` failed; others send no new work once they hear of it."""
        ...


@dataclass(frozen=True)
class WorkerPresence:
    """A verifier or draft service: SERVING, telling its state to those who ask, and with a lease where there is a registry.

    Construct it before the server starts. registry: None where others find workers without one. zone, prefixes: see Lease.
    """

    server: RpcServer
    registry: Registry | None
    role: Role
    model: ModelInfo
    load: Callable[[], Load]
    zone: str = ""
    prefixes: Callable[[], frozenset[int]] = frozenset
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        add_WorkerServicer_to_server(_Worker(self), self.server.aio)

    def lease(self, address: str) -> Lease:
        """The present state, as found at `address`."""
        return Lease(self.role, address, self.incarnation, self.model, self.load(), self.zone, self.prefixes())

    async def enter(self, address: str) -> None:
        """Answer health checks with SERVING and publish the lease. Raises ConfigError if nobody can dial `address`."""
        host, _, _ = address.rpartition(":")
        if self.registry and host in _EVERYWHERE:
            raise ConfigError(f"server.host {host} listens everywhere; set server.advertise to the host others can dial")
        await self.server.set_serving(True)
        if self.registry:
            await self.registry.publish(lambda: self.lease(address))

    async def leave(self) -> None:
        """Answer NOT_SERVING first, then take the lease back."""
        await self.server.set_serving(False)
        if self.registry:
            await self.registry.withdraw()
            await self.registry.close()


class _Worker(WorkerServicer):
    """The state of a worker, for those who ask it itself."""

    def __init__(self, presence: WorkerPresence) -> None:
        self._presence = presence

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:  # noqa: N802
        """Who is there, and how busy."""
        return status_to_message(self._presence.lease(""))


async def serve(server: RpcServer, service_names: Sequence[str], config: ServerConfig, presence: Presence) -> None:
    """Listen until SIGTERM or SIGINT (or cancellation), then drain and stop.

    Servicers are registered on `server.aio` before. Raises ConfigError when the port is taken.
    """
    with _StopSignal() as stop:
        address = await server.start(service_names)
        linger = 0.0
        try:
            await presence.enter(address)
            log.info("serving on %s", address)
            await stop.wait()
            linger = config.linger_seconds
            log.info("stopping; running calls have %.0f s to finish", config.drain_seconds)
        finally:
            await presence.leave()
            await asyncio.sleep(linger)
            await server.stop(config.drain_seconds)


def main(kind: type[ConfigT], run: Callable[[ConfigT], Coroutine[Any, Any, None]]) -> None:
    """Command line of a service: `--config FILE --set key=value ...`. Does not return.

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
            for line in describe(settings):
                log.info("config %s", line)
            asyncio.run(run(settings))
        except EyasError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from error

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()


def configure_logging() -> None:
    """One line per event on stderr, from INFO up."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


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
