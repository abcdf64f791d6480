"""How a verifier says that it is ready, and how it learns which drafters are. Knows no requests.

The ranks of a verifier: environment and config in, their places out. A rank other than 0 follows and serves health.

The only place that reads the environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torch has them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eyas.config import VerifierConfig
from eyas.engine.build import follow
from eyas.errors import ConfigError
from eyas.models.workers import RankInfo
from eyas.rpc.channel import Peers
from eyas.rpc.messages import Lease
from eyas.rpc.server import RpcServer
from eyas.services.discovery.base import Discovery
from eyas.services.lifecycle import Registration

log = logging.getLogger(__name__)


@dataclass
class VerifierRegistration:
    """A worker's presence, beside which `follow` is told the live drafters' leases every `interval` seconds."""

    worker: Registration
    discovery: Discovery
    follow: Callable[[tuple[Lease, ...]], None]
    interval: float
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def enter(self, address: str) -> None:
        """Be present, and begin to look for drafters."""
        await self.worker.enter(address)
        await self.discovery.watch("draft")
        self._task = asyncio.create_task(self._follow(), name="drafters")

    async def leave(self) -> None:
        """Follow no longer, and be gone; running requests keep their drafters."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.worker.leave()
        await self.discovery.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            try:
                self.follow(self.discovery.known("draft"))
            except Exception:
                log.exception("a look at the drafters failed; trying again")


# When a rank is gone, rank 0 may be caught in a sum that will never be complete: the process ends after this, come what may.
END_SECONDS = 15


def place_of(config: VerifierConfig, environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Where this process stands. Without RANK it is rank 0 and starts the others itself.

    Raises ConfigError for an environment that is incomplete or does not fit `engine.tensor_parallel_size`.
    """
    size = config.engine.tensor_parallel_size
    if "RANK" not in environment or size == 1:
        return RankInfo(0, size, config.device)
    try:
        rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank, address = int(environment.get("LOCAL_RANK", "0")), environment["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"RANK is set, so WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be too: {error}") from error
    if world != size or not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of WORLD_SIZE {world} does not fit engine.tensor_parallel_size {size}")
    device = f"cuda:{local_rank}" if config.device == "cuda" else config.device
    kept = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(rank, size, device, address, port, kept)


def end_in_time(reason: str) -> None:
    """A rank is gone: have the system end this process soon, in whatever state it is by then."""
    log.critical("no rank can go on without the others; ending within %d s: %s", END_SECONDS, reason)
    signal.alarm(END_SECONDS)


async def follow_rank_0(config: VerifierConfig, place: RankInfo) -> None:
    """Compute for rank 0 until it stops; health says SERVING once the share is loaded. Rank 0 decides what a signal to the
    whole group means, so that running calls can finish. Raises Unavailable when rank 0 is gone."""
    server = RpcServer(config.server, credentials=Peers(config.peers).server_credentials)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, log.info, "rank %d stops when rank 0 does", place.rank)

    def ready() -> None:
        asyncio.run_coroutine_threadsafe(server.set_serving(True), loop)

    address = await server.start(())
    log.info("rank %d of %d; health is served on %s", place.rank, place.size, address)
    try:
        await asyncio.to_thread(follow, config.model, config.dtype, config.engine.max_model_len, place, ready)
    finally:
        await server.set_serving(False)
        await server.stop(0)
