"""The services under fuzzing: a draft service, a verifier and a router each a process, with tiny random models."""

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from grpc_health.v1 import health_pb2_grpc

from eyas.rpc.channel import open_sync_channel
from eyas.services.local.cluster import Child, ServiceSettings, free_port, is_serving
from tests.support.tiny import DEMO, write_head, write_target

VOCAB_SIZE, DRAFT_VOCAB_SIZE, MAX_MODEL_LEN = 4096, 256, 32
SECRET = "key-and-token-of-the-fuzzed-services"  # of clients at the router, and of services at each other
START_TIMEOUT_S, POLL_INTERVAL_S = 240.0, 0.05
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{# <tool_call> </think> #}"
ENGINE = ("engine.max_kv_tokens=4096", "engine.max_num_seqs=32", f"engine.max_model_len={MAX_MODEL_LEN}")
TREE = ("tree.num_draft_tokens=8", "tree.num_steps=3", "tree.top_k=3")
QUICK = (
    "server.graceful_shutdown_timeout_s=1",
    "discovery.kind=static",
    "discovery.probe_interval_s=0.2",
    "server.reflection=true",
)


@dataclass(frozen=True)
class Services:
    """The running services by role. http: host:port of the router's HTTP server. target: folder of the target."""

    draft: Child
    verifier: Child
    router: Child
    http: str
    target: str

    @property
    def all(self) -> dict[str, Child]:
        """The processes by role."""
        return {"draft": self.draft, "verifier": self.verifier, "router": self.router}

    def check(self) -> None:
        """Raises Unavailable with the reason if a process has ended."""
        for child in self.all.values():
            child.check()

    def log_bytes(self) -> int:
        """What all of them have written into their logs."""
        return sum(child.log.stat().st_size for child in self.all.values())

    def tracebacks(self) -> list[str]:
        """The last line of each traceback in the logs: the exceptions that no code expected."""
        found = []
        for role, child in self.all.items():
            lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()
            starts = [at for at, line in enumerate(lines) if line.lstrip().startswith("Traceback (most recent call last)")]
            found += [f"{role}: {_exception(lines, at)}" for at in starts]
        return found


@contextmanager
def running_services(folder: Path) -> Iterator[Services]:
    """Write the models, start the services, and stop them at the end. folder: of models and logs."""
    target = write_target(folder / "target", vocab_size=VOCAB_SIZE)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / file, target)
    head = write_head(folder / "head", vocab_size=VOCAB_SIZE, draft_vocab=DRAFT_VOCAB_SIZE)
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    secret = folder / "secret"
    secret.write_text(SECRET)
    ports = {role: free_port() for role in ("draft", "verifier", "router", "http")}
    addresses = {role: f"127.0.0.1:{port}" for role, port in ports.items()}
    worker = ("served_model_name=tiny", f"model={target}", f"draft_model={head}", "threads=1", *TREE)
    drafters, verifiers = (f"discovery.{kind}=['{addresses[role]}']" for kind, role in FOUND)
    model = json.dumps([{"name": "tiny", "tokenizer": str(target), "chat_template": str(template)}])
    settings: dict[str, Sequence[str]] = {
        "draft": (*worker, "method=eagle3", "drafting.max_kv_tokens=4096"),
        "verifier": (*worker, *ENGINE, "validate_head=never", drafters),
        "router": (
            f"models={model}",
            f"http.port={ports['http']}",
            f"api_keys.file={secret}",
            "registry.url=''",
            verifiers,
            drafters,
        ),
    }
    children: dict[str, Child] = {}
    try:
        for role, own in settings.items():
            command = (
                ServiceSettings(role).add(*own, *QUICK, f"peers.token_file={secret}", f"server.port={ports[role]}").command()
            )
            children[role] = Child(role, addresses[role], command, folder / f"{role}.log")
        services = Services(**children, http=addresses["http"], target=str(target))
        _wait(services)
        yield services
    finally:
        for child in children.values():
            child.process.terminate()
        for child in children.values():
            child.wait_or_kill(time.monotonic() + child.stop_timeout_s)


FOUND = (("drafters", "draft"), ("verifiers", "verifier"))


def _wait(services: Services) -> None:
    """Return once all serve and the router has a drafter. Raises Unavailable if one ends, TimeoutError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for child in services.all.values():
        with open_sync_channel(child.address) as channel:
            while not is_serving(health_pb2_grpc.HealthStub(channel)):
                _pause(services, deadline)
    while not _has_drafter(services.http):
        _pause(services, deadline)


def _pause(services: Services, deadline: float) -> None:
    services.check()
    if time.monotonic() > deadline:
        raise TimeoutError(f"the services did not start within {START_TIMEOUT_S} s")
    time.sleep(POLL_INTERVAL_S)


def _has_drafter(http: str) -> bool:
    with suppress(URLError, OSError), urllib.request.urlopen(f"http://{http}/health", timeout=5) as response:
        models = json.load(response)["models"]
        return bool(models.get("tiny", {}).get("drafters"))
    return False


def _exception(lines: Sequence[str], at: int) -> str:
    """The line after a traceback's frames."""
    indent = len(lines[at]) - len(lines[at].lstrip())
    following = (line for line in lines[at + 1 :] if len(line) - len(line.lstrip()) <= indent)
    return next(following, lines[-1]).strip()
