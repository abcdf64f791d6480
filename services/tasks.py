"""Work beside the work: a step repeated for ever, and a task ended for certain. Knows nothing of what is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_CANCEL_SECONDS = 0.1

log = logging.getLogger(__name__)


async def forever(seconds: float, step: Callable[[], Awaitable[object]]) -> None:
    """Run `step` now and again `seconds` after it ended, until cancelled; what it raises is logged."""
    while True:
        try:
            await step()
        except Exception:
            log.exception("a step in the background failed; trying again")
        await asyncio.sleep(seconds)


async def every(seconds: float, step: Callable[[], Awaitable[object]]) -> None:
    """Run `step` in `seconds`, and then as `forever` does."""
    await asyncio.sleep(seconds)
    await forever(seconds, step)


async def stop(task: asyncio.Task[None] | None) -> None:
    """End a task, however often it takes: a lost connection may swallow a cancellation that meets it half-way."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_SECONDS)
