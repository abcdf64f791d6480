"""Many short requests with random cancellations: `python -m tests.engine.soak [NUM_REQUESTS]`.

At the end no sequence owns a slot, the drafter has forgotten everybody, and memory has not grown since the first tenth.
For that, set FEW_PRODUCTS of tests.support.memory in the environment before.
"""

import random
import re
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine
from eyas.models.heads.eagle import load_fuser
from eyas.models.loading import load_target
from tests.support.tiny import fixed_config, write_head, write_target

NUM_SLOTS, DRAFT_SLOTS = 400, 300
MOST_SECONDS = 900.0
MOST_GROWTH = 32.0
CHECK_EVERY = 20
STEP_SECONDS = 0.005


@dataclass
class Soak:
    """The result of a soak. growth: of the process's peak memory after the first tenth, in MiB."""

    num_finished: int = 0
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_owned: int = 0
    num_draft_slots: int = 0
    growth: float = 0.0


def soak(num_requests: int, target: str, head: str, seed: int = 0) -> Soak:
    """Keep an engine busy, with some of everything: shared beginnings, sessions, priorities, cancellations."""
    rng, found, tree = random.Random(seed), Soak(), TreeConfig(8, 3, 3)
    fuser = load_fuser(head, target)
    drafter = DraftHead(head, "eagle3").build_drafter(
        target, "float32", "cpu", tree, DraftingConfig(max_kv_tokens=DRAFT_SLOTS)
    )
    config = fixed_config(
        max_kv_tokens=NUM_SLOTS, max_num_seqs=32, max_prefill_tokens=128, max_verify_tokens=128, session_cache_ttl_s=0.05
    )
    engine = assemble_engine(
        load_target(target, aux_hidden_state_layers=fuser.aux_hidden_state_layers), fuser, config, tree, drafter
    )
    live: list[str] = []
    submitted, step, settled, started = 0, 0, 0.0, time.monotonic()
    engine.scheduler._clock = lambda: step * STEP_SECONDS
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("requests", total=num_requests)
        while submitted < num_requests or engine.has_work:
            assert time.monotonic() - started < MOST_SECONDS, f"{submitted} requests in {MOST_SECONDS} s: too slow"
            while submitted < num_requests and len(live) < 80:
                engine.submit(make_request(submitted, rng))
                live.append(f"{submitted}")
                submitted += 1
            if live and rng.random() < 0.3:
                engine.cancel(rng.choice(live))
            for chunk in engine.step():
                if chunk.finish_reason:
                    live.remove(chunk.request_id)
                    found.num_finished += chunk.finish_reason != "cancelled"
                    found.num_cancelled += chunk.finish_reason == "cancelled"
            step += 1
            if step % CHECK_EVERY == 0:
                engine.check()
            if not settled and found.num_finished + found.num_cancelled >= num_requests / 10:
                settled = peak_memory()
            progress.update(task, completed=found.num_finished + found.num_cancelled)
    engine.check()
    found.num_preemptions = engine.scheduler.num_preemptions
    found.num_owned = NUM_SLOTS - engine.load.free_kv_tokens
    found.num_draft_slots = DRAFT_SLOTS - drafter.sessions.num_free  # type: ignore[attr-defined]
    found.growth = peak_memory() - settled
    return found


def make_request(number: int, rng: random.Random) -> Request:
    family = rng.randrange(8)
    prompt = [3 + family, *range(5, 5 + 4 * family), *(rng.randrange(3, 48) for _ in range(rng.randrange(1, 50)))]
    max_tokens = rng.randrange(1, 16) if rng.random() < 0.7 else 70
    sampling = SamplingParams(max_tokens, rng.choice([0.0, 0.8]), seed=number)
    return Request(f"{number}", tuple(prompt), sampling, f"{number % 50}" if family else "", rng.randrange(3))


def peak_memory() -> float:
    """Of this process, in MiB. On Linux without that of the process which started it, unlike `getrusage`."""
    if sys.platform == "linux":
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_target(Path(folder) / "target"), write_head(Path(folder) / "head")
        started = time.monotonic()
        found = soak(num_requests, str(target), str(head))
    print(f"{found} in {time.monotonic() - started:.0f} s")
    assert found.num_finished + found.num_cancelled == num_requests
    assert found.num_cancelled > num_requests / 30
    assert found.num_preemptions > 0
    assert found.num_owned == found.num_draft_slots == 0
    assert found.growth <= MOST_GROWTH, f"memory grew by {found.growth:.1f} MiB"


if __name__ == "__main__":
    main()
