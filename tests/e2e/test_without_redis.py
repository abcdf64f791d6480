"""Router, verifier and draft service with static discovery: drafting works without Redis."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from eyas.api.request import SamplingParams
from eyas.errors import Unavailable
from eyas.rpc.messages import NO_DRAFTER
from eyas.services.local.cluster import free_port
from eyas.services.local.demo import CONFIGS
from tests.support.services.forks import Popen
from tests.support.services.grpc_client import Generated, generate

PROMPT = (0, 282, 659, 276)


@contextmanager
def service(name: str, log: Path, *settings: str) -> Iterator[None]:
    command = [sys.executable, "-m", f"eyas.services.{name}", "--config", str(CONFIGS / f"{name}.yaml")]
    for setting in ("registry.url=''", "discovery.kind=static", *settings):
        command += ["--set", setting]
    with log.open("wb") as output, Popen(command, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.mark.nightly
def test_a_router_a_verifier_and_a_drafter_meet_without_redis(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("draft", "verifier", "router")}
    draft, verifier, router = (f"127.0.0.1:{ports[name]}" for name in ("draft", "verifier", "router"))
    settings = {
        "verifier": ("validate_head=never", "engine.draft_budget=fixed"),
        "router": (f"http.port={free_port()}",),
    }
    workers = (f"discovery.drafters=['{draft}']", f"discovery.verifiers=['{verifier}']")
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        for name in ports:
            stack.enter_context(
                service(name, tmp_path / name, f"server.port={ports[name]}", *workers, *settings.get(name, ()))
            )
        deadline = time.monotonic() + 250
        while not (drafted := attempt(router, sampling)) or not drafted.stats.num_accepted:
            assert time.monotonic() < deadline, [(tmp_path / name).read_text() for name in ports]
            time.sleep(0.1)
        plain = generate(router, PROMPT, sampling, NO_DRAFTER)
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.num_drafted == 0


def attempt(router: str, sampling: SamplingParams) -> Generated | None:
    """The answer; None while no verifier can be reached."""
    try:
        return generate(router, PROMPT, sampling)
    except Unavailable:
        return None
