"""The ranks of a tensor-parallel verifier: which one this process is, and what a rank other than 0 does.

Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the environment, as torchrun sets them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping

from eyas.config import VerifierConfig
from eyas.engine.build import run_worker
from eyas.errors import ConfigError
from eyas.models.workers import RankInfo
from eyas.rpc.channel import Peers
from eyas.rpc.server import RpcServer

# When a rank is gone, rank 0 may hang in an all-reduce forever: the system ends the process after this time.
END_SECONDS = 15

log = logging.getLogger(__name__)


def rank_info(config: VerifierConfig, environment: Mapping[str, str] = os.environ) -> RankInfo:
    """The rank of this process. Without RANK it is rank 0 and starts the others itself.

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
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(rank, size, device, address, port, has_store)


def end_in_time(reason: str) -> None:
    """Have the system end this process soon, in whatever state it is, because another rank is gone."""
    log.critical("no rank can go on without the others; ending within %d s: %s", END_SECONDS, reason)
    signal.alarm(END_SECONDS)


async def follow_rank_0(config: VerifierConfig, info: RankInfo) -> None:
    """Compute for rank 0 until it stops. Health says SERVING once the shard is loaded.

    Signals are ignored: a signal to the whole group stops rank 0, which first finishes its running calls.
    Raises Unavailable when rank 0 is gone.
    """
    server = RpcServer(config.server, credentials=Peers(config.peers).server_credentials)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, log.info, "rank %d stops when rank 0 does", info.rank)

    def ready() -> None:
        asyncio.run_coroutine_threadsafe(server.set_serving(True), loop)

    address = await server.start(())
    log.info("rank %d of %d; health is served on %s", info.rank, info.size, address)
    try:
        await asyncio.to_thread(run_worker, config.model, config.dtype, config.engine.max_model_len, info, ready)
    finally:
        await server.set_serving(False)
        await server.stop(0)
