"""A router as a process, in a Python where importing torch or transformers fails."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

BLOCKED = (
    "import sys, runpy; sys.modules['torch'] = sys.modules['transformers'] = None; "
    "runpy.run_module('eyas.services.router', run_name='__main__')"
)


@asynccontextmanager
async def router_process(url: str, *settings: str) -> AsyncIterator[Process]:
    """Run a router for the model "demo"; killed at the end if it has not ended."""
    own = (
        f"registry.url={url}",
        "registry.heartbeat_interval_s=0.1",
        "models=[{name: demo, tokenizer: models/demo/target}]",
    )
    arguments = [argument for setting in (*own, *settings) for argument in ("--set", setting)]
    environment = os.environ | {"NO_COLOR": "1"}
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", BLOCKED, *arguments, stderr=PIPE, env=environment)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def line_with(child: Process, pattern: str) -> str:
    """Return what the group of a pattern matches in the next line on stderr that has the pattern."""
    assert child.stderr is not None
    async with asyncio.timeout(120):
        while not (found := re.search(pattern, line := (await child.stderr.readline()).decode())):
            assert line, f"ended without printing {pattern!r}"
    return found[1]
