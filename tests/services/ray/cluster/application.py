"""A tiny model on a local Ray, as examples/configs/ray/demo.yaml has the demo model but on free ports."""

import asyncio
import copy
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from eyas.config import RegistryConfig
from eyas.services.discovery.redis_registry import Lease, Registry
from eyas.services.local.cluster import free_port
from eyas.services.local.demo import ROOT
from tests.support.services.collector import Collector, collecting
from tests.support.services.redis_server import running_redis
from tests.support.tiny import write_head, write_spelling_tokenizer, write_target

CONFIG = ROOT / "examples" / "configs" / "ray" / "demo.yaml"
# What Ray calls: no reports, a token for its control plane as in the chart, news of the replicas soon, and processes
# that get as much of a core as other tests.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "OMP_NUM_THREADS": "1",
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_prestart_worker_first_driver": "0",
    "OTEL_BSP_SCHEDULE_DELAY": "1000",
}
START_SECONDS = 400.0
STOP_SECONDS = 30.0
LOG_LINES = 20
# A request of this many tokens cannot end by itself while a test waits.
MAX_MODEL_LEN = 65536

# Two requests fill a verifier, and one is enough to keep it. A drafter is busy for a small part of a step, so low bounds
# count it as full here: that scales drafters where `max_drafters` allows more than one, as in the soak. Else only verifiers
# scale.
POOLS = {
    "router": {"num_cpus": 0.1, "max_replicas": 1},
    "verifier": {
        "look_back_period_s": 1.0, "num_cpus": 0.5, "max_replicas": 2,
        "scaling": {"low": 0.02, "upscale_delay_s": 0.5, "downscale_delay_s": 6.0},
    },
    "draft": {
        "look_back_period_s": 1.0, "num_cpus": 0.5, "max_replicas": 1,
        "scaling": {"low": 0.1, "target": 0.11, "high": 0.12, "upscale_delay_s": 0.5, "downscale_delay_s": 3.0},
    },
}  # fmt: skip


@dataclass
class RayApplication:
    """A running application: its addresses, its traces, the file of `serve`, and the states that its driver reports."""

    grpc: str
    http: str
    registry: str
    collector: Collector
    file: Path
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
            time.sleep(0.5)  # each question keeps three processes busy for a while

    def verifiers(self) -> list[Lease]:
        """The leases of the verifiers."""

        async def read() -> list[Lease]:
            registry = Registry(RegistryConfig(self.registry))
            try:
                return await registry.leases("verifier")
            finally:
                await registry.close()

        return asyncio.run(read())

    def redeploy(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Give `serve` its file again, with a change to the application's args."""
        config = yaml.safe_load(self.file.read_text())
        change(config["applications"][0]["args"])
        self.file.write_text(yaml.safe_dump(config))
        assert self.driver.stdin is not None
        self.driver.stdin.write("again\n")
        self.driver.stdin.flush()

    def end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def ready(self) -> bool:
        """Whether the router says that requests can be served."""
        try:
            return (
                httpx.get(f"{self.http}/health", timeout=5, verify=False).status_code == 200
            )  # certificates take time to load
        except httpx.TransportError:
            return False

    def follow(self) -> None:
        """Keep `states` fresh until the driver ends."""
        for line in self.driver.stdout or ():
            if line.startswith("{"):
                self.states = json.loads(line)


@contextmanager
def running_application(
    folder: Path, model: Path, command: str = "run", deployments: Sequence[Mapping[str, Any]] = (), max_drafters: int = 1
) -> Iterator[RayApplication]:
    """The application with Redis, Ray and collector of traces of its own; stopped whatever happens. model: of `write_model`.
    command: of `serve`. deployments: overrides of Serve's options, as its config files list them."""
    own, traces = tempfile.mkdtemp(prefix="ray"), free_port()  # a short name: sockets lie in it
    with running_redis(free_port()) as registry, collecting(traces) as collector:
        file, log = folder / "serve.yaml", folder / "driver.log"
        config = settings(model, registry, deployments)
        config["applications"][0]["args"]["pools"]["draft"] |= {"max_replicas": max_drafters}
        file.write_text(yaml.safe_dump(config))
        driver = start([command, str(file), own], f"http://127.0.0.1:{traces}", log)
        ports = config["grpc_options"]["port"], config["http_options"]["port"]
        addresses = f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        application = RayApplication(*addresses, registry, collector, file, driver, log)
        follower = threading.Thread(target=application.follow)
        follower.start()
        try:
            application.wait(application.ready, START_SECONDS, "the application is not ready")
            yield application
        finally:
            stop(driver)
            follower.join()
            assert driver.stdout is not None
            driver.stdout.close()
            shutil.rmtree(own, ignore_errors=True)


def start(words: Sequence[str], traces: str, log: Path) -> subprocess.Popen[str]:
    """Start the driver. traces: the URL that all processes of Ray and Serve send their spans to."""
    environment = {**os.environ, **ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": traces, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.services.ray.cluster.driver", *words]
    with log.open("w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )


def write_model(folder: Path) -> Path:
    """A tiny target for long outputs, with its tokenizer, and its head in the subfolder head."""
    write_target(folder, max_model_len=MAX_MODEL_LEN)
    write_spelling_tokenizer(folder)
    write_head(folder / "head")
    return folder


def settings(model: Path, registry: str, deployments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The example with this model, two requests a verifier, quick pools, this registry and free ports.

    Drafts may take long, because other tests compute meanwhile: with a short timeout every step would wait for nothing.
    """
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["http_options"]["port"], config["grpc_options"]["port"] = free_port(), free_port()
    config["applications"][0]["deployments"] = [dict(deployment) for deployment in deployments]
    args = config["applications"][0]["args"]
    for service in ("router", "verifier", "draft"):
        args[service]["registry"] = {"url": registry, "heartbeat_interval_s": 0.25, "ttl_s": 20}
    args["router"]["models"][0]["tokenizer"] = str(model)
    for service in ("verifier", "draft"):
        args[service] |= {"model": str(model), "draft_model": str(model / "head")}
    args["verifier"]["engine"] |= {"max_num_seqs": 2, "max_queued_requests": 8, "max_kv_tokens": 2 * MAX_MODEL_LEN}
    args["verifier"]["engine"]["draft_budget"] = "fixed"
    args["verifier"]["draft_client"]["draft_timeout_s"] = 30
    args["verifier"]["validate_head"] = "never"
    args["verifier"]["telemetry"] = {"step_span_ratio": 0.2}
    args["verifier"]["server"]["shutdown_delay_s"] = 0.5
    args["draft"]["server"]["shutdown_delay_s"] = 0.5
    args["pools"] = copy.deepcopy(POOLS)
    return config


def stop(driver: subprocess.Popen[str]) -> None:
    """Shut Serve and Ray down; kill the driver if it takes too long."""
    assert driver.stdin is not None
    driver.stdin.close()
    try:
        driver.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
