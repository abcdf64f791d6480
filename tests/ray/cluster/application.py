"""The demo model on a local Ray, as examples/configs/ray/demo.yaml has it but on free ports."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from services.cluster import ROOT
from tests.services.redis_server import free_port, running_redis

CONFIG = ROOT / "examples" / "configs" / "ray" / "demo.yaml"
# Ray's own way of saying: no reports, no passwords on localhost, and news of the replicas at once.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "OMP_NUM_THREADS": "1",
}
STOP_SECONDS = 30.0
LOG_LINES = 20

WAITS = {"window_seconds": 1.0, "damping": {"up_seconds": 0.5, "down_seconds": 3.0}}
# Two requests fill a verifier. The head is busy for a small part of a round only, which counts as full here.
POOLS = {
    "router": {"num_cpus": 0.1, "max_replicas": 1},
    "verifier": WAITS | {"num_cpus": 0.5, "max_replicas": 2},
    "draft": {
        "window_seconds": 1.0, "num_cpus": 0.5, "max_replicas": 2,
        "damping": {"low": 0.1, "target": 0.11, "high": 0.12, "up_seconds": 0.5, "down_seconds": 3.0},
    },
}  # fmt: skip


@dataclass
class RayApplication:
    """A running application: where it listens, and what its driver has told."""

    grpc: str
    http: str
    registry: str
    driver: subprocess.Popen[str]
    log: Path
    states: dict[str, dict[str, int]] = field(default_factory=dict)

    def running(self, *names: str) -> list[int]:
        """How many replicas of these deployments run."""
        return [self.states.get(name, {}).get("RUNNING", 0) for name in names]

    def settled(self, *names: str) -> bool:
        """Whether no replica of these deployments starts or stops."""
        return all(set(self.states.get(name, {})) <= {"RUNNING"} for name in names)

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Return once the condition holds; fail with the end of the log if it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.driver.poll() is not None or time.monotonic() > deadline
            assert not ended, f"{what}: {self.states}\n{self.end_of_log()}"
            time.sleep(0.05)

    def end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def ready(self) -> bool:
        """Whether the router says that requests can be served."""
        try:
            return httpx.get(f"{self.http}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def follow(self) -> None:
        """Keep `states` fresh until the driver ends."""
        for line in self.driver.stdout or ():
            if line.startswith("{"):
                self.states = json.loads(line)


@contextmanager
def running_application(folder: Path) -> Iterator[RayApplication]:
    """The application with Redis and a Ray of its own; stopped whatever happens."""
    own = tempfile.mkdtemp(prefix="ray")  # a short name: sockets lie in it
    with running_redis(free_port()) as registry:
        config = settings(registry)
        file, log = folder / "serve.yaml", folder / "driver.log"
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "tests.ray.cluster.driver", str(file), own]
        with log.open("w") as output:
            driver = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=output, text=True,
            )  # fmt: skip
        ports = config["grpc_options"]["port"], config["http_options"]["port"]
        application = RayApplication(f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", registry, driver, log)
        assert driver.stdout is not None
        follower = threading.Thread(target=application.follow)
        follower.start()
        try:
            application.wait(application.ready, 100, "the application is not ready")
            yield application
        finally:
            stop(driver)
            follower.join()
            driver.stdout.close()
            shutil.rmtree(own, ignore_errors=True)


def settings(registry: str) -> dict[str, Any]:
    """The example with two requests a verifier, quick pools, this registry and free ports."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["http_options"]["port"], config["grpc_options"]["port"] = free_port(), free_port()
    args = config["applications"][0]["args"]
    for service in ("router", "verifier", "draft"):
        args[service]["registry"] = {"url": registry, "heartbeat": 0.25, "ttl": 3}
    args["verifier"]["engine"]["max_running"] = 2
    args["verifier"]["server"]["linger_seconds"] = 0.5
    args["draft"]["server"]["linger_seconds"] = 0.5
    args["pools"] = POOLS
    return config


def stop(driver: subprocess.Popen[str]) -> None:
    """Let it shut Serve and Ray down; force it if it does not."""
    assert driver.stdin is not None
    driver.stdin.close()
    try:
        driver.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
