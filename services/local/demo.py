"""The demo model of a checkout with its best settings, and the signal that kills its drafter for the playground."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from eyas.api.request import SamplingParams
from eyas.client import Client
from eyas.errors import ConfigError
from eyas.services.lifecycle import is_loopback
from eyas.services.local.cluster import CONFIG_TYPES, Cluster, ServiceSettings, assign, running_cluster
from eyas.services.router.http.drafter_kill import KILL_SIGNAL, SUPERVISOR_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs" / "local"
WARM_UP_PROMPT = "class Cache:\n    def __init__(self, size):\n        self.size = size\n        self.entries = {}\n"
WARM_UP_TOKENS = 96
NUM_DRAFTED_WARM_UPS = 4
MAX_WARM_UPS = 10


def running_demo(port: int, assignments: Sequence[str] = ()) -> AbstractContextManager[Cluster]:
    """Run the cluster of examples/configs/local.

    Args:
        port: of the router's gRPC server.
        assignments: service.key=value settings.

    Raises ConfigError outside a checkout and for settings that a service would refuse.
    """
    return running_cluster(assign(demo_services(), assignments), port, folder=ROOT)


def demo_services() -> list[ServiceSettings]:
    """Return the services of examples/configs/local. Raises ConfigError outside a checkout."""
    if not CONFIGS.is_dir():
        raise ConfigError(f"{CONFIGS} does not exist; run the demo from a checkout, or any model with `eyas serve MODEL`")
    return [ServiceSettings(name, CONFIGS / f"{name}.yaml") for name in CONFIG_TYPES]


def with_kills(services: Sequence[ServiceSettings], host: str) -> list[ServiceSettings]:
    """Return the services with a router that may ask this process to kill the drafter.

    Raises ConfigError if there is no drafter to kill, or if other machines could have it killed.
    """
    if not any(service.name == "draft" for service in services):
        raise ConfigError("--demo kills and restarts a draft service, and none is started; give --draft-model")
    if not is_loopback(host):
        raise ConfigError(f"--demo lets the playground kill the drafter, so it serves this machine only, not --host {host}")
    own = {SUPERVISOR_VARIABLE: str(os.getpid())}
    return [replace(each, environment={**each.environment, **own}) if each.name == "router" else each for each in services]


def ignore_kills() -> None:
    """Let the router's signal have no effect while services start. Unlike SIG_IGN, a function is not inherited by them."""
    signal.signal(KILL_SIGNAL, lambda *_: None)


def kill_drafter_on_signal(cluster: Cluster) -> None:
    """Kill the draft service whenever the router asks for it."""
    signal.signal(KILL_SIGNAL, lambda *_: cluster.kill_drafter())


def warm_up(address: str, api_key: str = "") -> None:
    """Decode with and without drafts until the draft budget has seen the cost of both, MAX_WARM_UPS requests at most."""
    greedy = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0)
    with Client(address, api_key=api_key) as client:
        client.generate(WARM_UP_PROMPT, greedy, draft=False)
        num_drafted = 0
        for _ in range(MAX_WARM_UPS):
            (answer,) = client.generate(WARM_UP_PROMPT, greedy)
            num_drafted += answer.outputs[0].stats.num_drafted > 0
            if num_drafted == NUM_DRAFTED_WARM_UPS:
                break
