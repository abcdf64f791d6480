"""Services that do harm or come to harm. SIGUSR1 freezes the interpreter of each, and each ends with this process.

`python -m tests.chaos.services NAME SECONDS WORDS` runs one as `python -m eyas.services.NAME WORDS` would, and adds SECONDS
to its wall clock.
"""

import asyncio
import ctypes
import math
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eyas.config import DraftConfig
from eyas.drafters.draft_head import DraftHead
from eyas.models.checkpoint import Checkpoint
from eyas.services.draft import __main__ as draft
from eyas.services.draft.servicer import DraftServicer
from eyas.services.lifecycle import service_app
from eyas.services.local.cluster import PR_SET_PDEATHSIG
from eyas.services.router import __main__ as router
from eyas.services.verifier import __main__ as verifier
from eyas.v1 import draft_pb2
from tests.chaos.freezing import hold_the_lock
from tests.support.bad_drafters import RandomDrafter
from tests.support.services.forks import Popen

DISK_FULL = Path("/dev/full")


def start(name: str, words: Sequence[str], log: Path, clock_skew_s: float = 0.0) -> Popen[bytes]:
    """Start a service with the words of its command line, or the program `name` if it is no service.

    log: receives its output. clock_skew_s: added to its wall clock.
    """
    command = [sys.executable, "-m", __name__, name, str(clock_skew_s)] if name in _APPS else [name]
    ends_with_us = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    with log.open("ab") as output:
        return Popen([*command, *words], stdout=output, stderr=output, preexec_fn=ends_with_us)


def main(name: str, clock_skew_s: str, *words: str) -> None:
    signal.signal(signal.SIGUSR1, hold_the_lock)
    if float(clock_skew_s):
        _skew_clock(float(clock_skew_s))
    sys.argv = [name, *words]
    _APPS[name](list(words))


def _skew_clock(seconds: float) -> None:
    """Move the wall clock of this process; its monotonic clock stays."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


async def run_hostile(config: DraftConfig) -> None:
    """A draft service whose trees are random or invalid, and whose replies are damaged on the way out."""
    target = draft.read_target(Checkpoint(config.model))
    drafter = RandomDrafter(target.vocab_size, os.getpid())
    served = config.models[0]
    info = draft.describe(served.served_model_name, DraftHead(served.draft_model, served.method), drafter, target)
    DraftServicer.Speculate = _hostile_speculate  # type: ignore[method-assign,assignment]
    await draft.serve_drafters(config, [(drafter, info)])


_honest_speculate = DraftServicer.Speculate


async def _hostile_speculate(self: DraftServicer, requests: Any, context: Any) -> AsyncIterator[draft_pb2.SpeculateResponse]:
    """Answer as a drafter that wants to do harm, now and then late, and end the stream once in a while."""
    rng, sessions = random.Random(os.getpid()), set[str]()
    async for reply in _honest_speculate(self, requests, context):
        sessions.update(tree.session for tree in reply.trees)
        damage = rng.choice((*_DAMAGES, None, None))
        if damage is not None:
            for tree in reply.trees:
                damage(tree, rng, sorted(sessions))
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            yield reply
        reply.step += rng.choice((-1, 1))
        yield reply
        await asyncio.sleep(rng.choice((0, 0, 0, 0.15)))
        if rng.random() < 0.01:
            return


def _rename(tree: draft_pb2.Tree, rng: random.Random, sessions: Sequence[str]) -> None:
    tree.session = rng.choice(sessions)


def _misplace(tree: draft_pb2.Tree, rng: random.Random, sessions: Sequence[str]) -> None:
    tree.committed_length += rng.choice((-1, 1))
    tree.epoch += rng.choice((0, 1))


def _break_parents(tree: draft_pb2.Tree, rng: random.Random, sessions: Sequence[str]) -> None:
    tree.parents[:] = [rng.randrange(-2, len(tree.parents) + 2) for _ in tree.parents]


def _break_tokens(tree: draft_pb2.Tree, rng: random.Random, sessions: Sequence[str]) -> None:
    tree.tokens[:] = [rng.choice((-1, 2**31 - 1, token)) for token in tree.tokens]


def _break_scores(tree: draft_pb2.Tree, rng: random.Random, sessions: Sequence[str]) -> None:
    tree.log_probs[:] = [rng.choice((math.nan, math.inf, 1e38)) for _ in tree.log_probs]


def _shorten(tree: draft_pb2.Tree, rng: random.Random, sessions: Sequence[str]) -> None:
    del rng.choice((tree.tokens, tree.parents, tree.log_probs))[rng.randrange(3) :]


def _enlarge(tree: draft_pb2.Tree, rng: random.Random, sessions: Sequence[str]) -> None:
    for field in (tree.tokens, tree.parents, tree.log_probs):
        field.extend([0] * 10_000)


_DAMAGES = (_rename, _misplace, _break_parents, _break_tokens, _break_scores, _shorten, _enlarge)
_APPS = {
    "router": router.app,
    "verifier": verifier.app,
    "draft": draft.app,
    "hostile": service_app(DraftConfig, run_hostile),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
