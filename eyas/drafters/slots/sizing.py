"""How many token slots a drafter has: its settings and what a token costs in, a number out. Knows no sessions."""

from __future__ import annotations

import logging

import torch

from eyas.cache.kv import bytes_per_slot
from eyas.config import EagleConfig
from eyas.errors import ConfigError

DEFAULT_SLOTS = 65536
MIB = 2**20

log = logging.getLogger(__name__)


def count_slots(
    config: EagleConfig,
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    least: int = 1,
    what: str = "a token",
) -> int:
    """Token slots of draft KV; the log says how many, and what they take.

    shapes: (key-value heads, head width) of each layer. least: slots that a session needs to draft at all, which are for
    `what`. Raises ConfigError for a limit below that.
    """
    slot_bytes = bytes_per_slot(shapes, 0, dtype)
    given = f"eagle.memory {config.memory}" if config.memory else f"eagle.num_slots {config.num_slots}"
    # beside those that sessions have there is one more, see SlotPools
    num_slots = config.num_bytes // slot_bytes - 1 if config.memory else config.num_slots or DEFAULT_SLOTS
    if num_slots < least:
        needed = -(-(least + 1) * slot_bytes // 2**10)
        raise ConfigError(
            f"{given} cannot hold {what}: that takes {least} slots of {slot_bytes} bytes and a spare one; give at least "
            f"eagle.num_slots {least} or eagle.memory {needed}KiB"
        )
    size = (num_slots + 1) * slot_bytes / MIB
    log.info("draft KV: %d tokens, %.1f MiB on %s", num_slots, size, device)
    return num_slots
