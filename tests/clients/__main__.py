"""`python -m tests.clients`: run small jobs of other projects' clients against `eyas serve`; writes tests/clients/README.md.

Each client has an environment of its own, which is kept. A client that cannot be installed is reported with the reason.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.error import URLError

import typer

from eyas import __version__
from eyas.services.local.cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).with_name("jobs")
TARGET, DRAFT_MODEL = "models/demo/target", "models/demo/eagle3-full"
MODEL, MARK = "demo", "CHECK "
FOLDERS = re.compile(r"(?<![\w.:/-])/\S+/")  # of this machine, in errors
START_TIMEOUT_S, STOP_TIMEOUT_S, INSTALL_TIMEOUT_S = 300.0, 30.0, 1200.0
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# A client that needs torch gets the build for CPUs, or none.
CONSTRAINTS = ("torch==2.13.0+cpu",)


@dataclass(frozen=True)
class ClientJob:
    """A client. packages: of its environment. what: what it is. job: its script below `jobs`; `.mjs` runs under Node."""

    name: str
    what: str
    packages: tuple[str, ...]
    job: str

    @property
    def distribution(self) -> str:
        """The package whose version counts."""
        return self.packages[0].partition("[")[0]

    @property
    def is_node(self) -> bool:
        """True if its packages come from npm."""
        return self.job.endswith(".mjs")

    def program(self, environment: Path) -> list[str]:
        """Return the command of its job. Node looks for packages from where the script lies."""
        return ["node", str(environment / self.job)] if self.is_node else [str(_python(environment)), str(JOBS / self.job)]


CLIENTS = (
    ClientJob("openai", "OpenAI's client", ("openai",), "openai_job.py"),
    ClientJob("openai-node", "OpenAI's client for Node", ("openai", "zod"), "openai_job.mjs"),
    ClientJob("ai", "Vercel's AI SDK", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"), "ai_job.mjs"),
    ClientJob("anthropic", "Anthropic's client", ("anthropic",), "anthropic_job.py"),
    ClientJob("instructor", "objects from chats", ("instructor",), "instructor_job.py"),
    ClientJob("pydantic-ai", "agents with typed output", ("pydantic-ai-slim[openai,anthropic]",), "pydantic_ai_job.py"),
    ClientJob("openai-agents", "OpenAI's agents", ("openai-agents",), "openai_agents_job.py"),
    ClientJob("llm", "models on the command line", ("llm",), "llm_job.py"),
    ClientJob("langchain-openai", "LangChain's integration of OpenAI", ("langchain-openai",), "langchain_job.py"),
    ClientJob("litellm", "one interface to many providers", ("litellm", "mcp"), "litellm_job.py"),
    ClientJob("lm-eval", "EleutherAI's evaluation harness", ("lm-eval[api]", "transformers"), "lm_eval_job.py"),
    ClientJob("guidellm", "a benchmark of servers", ("guidellm",), "guidellm_job.py"),
    ClientJob("aiperf", "NVIDIA's benchmark of servers", ("aiperf",), "aiperf_job.py"),
)


@dataclass
class ClientResult:
    """What a client did.

    Attributes:
        date: of the run.
        problem: why it did not run; empty if it did.
        checks: the problem of each feature, empty for none.
    """

    client: ClientJob
    date: str = ""
    version: str = ""
    problem: str = ""
    seconds: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether every check passed."""
        return not self.problem and bool(self.checks) and not any(self.checks.values())

    def save(self, environments: Path) -> None:
        """Keep the result beside the client's environment."""
        values = {name: value for name, value in vars(self).items() if name != "client"}
        environments.mkdir(parents=True, exist_ok=True)
        (environments / f"{self.client.name}.json").write_text(json.dumps(values))


def latest(client: ClientJob, environments: Path) -> ClientResult:
    """Return the kept result of a client."""
    file = environments / f"{client.name}.json"
    return (
        ClientResult(client, **json.loads(file.read_text())) if file.is_file() else ClientResult(client, problem="not run")
    )


def main(
    only: Annotated[list[str] | None, typer.Argument(help="Names of clients; all by default.")] = None,
    environments: Annotated[Path, typer.Option(help="Folder of the clients' environments.")] = Path("build/clients"),
    out: Annotated[Path, typer.Option(help="Page to write, from the latest results.")] = Path("tests/clients/README.md"),
    timeout_s: Annotated[float, typer.Option(help="Most seconds of one client's job.")] = 600.0,
    url: Annotated[str, typer.Option(help="URL of a running server, instead of an own one.")] = "",
) -> None:
    """Run every client. Exits with 1 if a check failed."""
    known = {client.name: client for client in CLIENTS}
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"no client {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    chosen = [known[name] for name in only or known]
    results = []
    with tempfile.TemporaryDirectory(prefix="eyas-clients-") as folder, server(url, Path(folder)) as base:
        for number, client in enumerate(chosen, 1):
            note(f"[{number}/{len(chosen)}] {client.name}")
            results.append(run_client(client, environments.resolve(), base, timeout_s))
            results[-1].save(environments)
    for result in results:
        note(summary(result))
    out.write_text(page([latest(client, environments) for client in CLIENTS]), encoding="utf-8")
    note(f"wrote {out}")
    if not all(result.works for result in results):
        raise typer.Exit(1)


def note(line: str) -> None:
    """Show progress."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def server(url: str, folder: Path) -> Iterator[str]:
    """Start `eyas serve` with the demo model, and stop it at the end; yields its URL. url: of one that runs already."""
    if url:
        yield url.rstrip("/")
        return
    http, grpc = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("eyas")), "serve", TARGET, "--draft-model", DRAFT_MODEL]
    command += ["--served-model-name", MODEL, "--port", str(http), "--grpc-port", str(grpc)]
    command += ["--tool-call-parser", "hermes"]  # the demo's template shows no format, which the choice `auto` needs
    log = folder / "serve.log"
    note(f"starting {' '.join(command[1:])}")
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(f"http://127.0.0.1:{http}", process, log)
            yield f"http://127.0.0.1:{http}"
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()


def wait_until_healthy(base: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers. Raises RuntimeError with the end of its log if it ends, TimeoutError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended: {log.read_text()[-2000:]}")
        with suppress(URLError, OSError), urllib.request.urlopen(f"{base}/health", timeout=5):
            return
        time.sleep(0.5)
    raise TimeoutError(f"the server did not start within {START_TIMEOUT_S} s")


def run_client(client: ClientJob, environments: Path, base: str, timeout_s: float) -> ClientResult:
    """Install a client if it is not there yet, and run its job."""
    result, started = ClientResult(client, datetime.now(UTC).strftime("%Y-%m-%d")), time.monotonic()
    environment = environments / client.name
    result.problem = install(client, environment)
    if not result.problem:
        result.version = version_of(client, environment)
        run_job(client, environment, base, timeout_s, result)
    result.seconds = time.monotonic() - started
    return result


def install(client: ClientJob, environment: Path) -> str:
    """Make the environment of a client. Returns why that failed; empty if it did not."""
    ready = environment / ".ready"
    if ready.is_file():
        return ""
    if client.is_node and not shutil.which("npm"):
        return "not installed: there is no npm"
    note(f"  installing {' '.join(client.packages)}")
    shutil.rmtree(environment, ignore_errors=True)
    command = _npm(client, environment) if client.is_node else _pip(client, environment)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not installed within {INSTALL_TIMEOUT_S:.0f} s"
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        return f"not installed: {errors[-1] if errors else done.stderr.strip()[-300:]}"
    ready.touch()
    return ""


def _pip(client: ClientJob, environment: Path) -> list[str]:
    """Make an empty environment of Python; return the command that fills it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    constraints = environment / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in CONSTRAINTS))
    uv = shutil.which("uv")  # much faster, where it is there
    into = ("--python", str(_python(environment)))
    command = [uv, "pip", "install", *into] if uv else [*PIP, *into, "install"]
    return [*command, "--quiet", "-c", str(constraints), *client.packages]


def _npm(client: ClientJob, environment: Path) -> list[str]:
    """Make an empty environment of Node; return the command that fills it."""
    environment.mkdir(parents=True)
    (environment / "package.json").write_text('{"private": true}\n')
    return ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(environment), *client.packages]


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def version_of(client: ClientJob, environment: Path) -> str:
    """Return the installed version."""
    if client.is_node:
        file = environment / "node_modules" / client.distribution / "package.json"
        return str(json.loads(file.read_text())["version"])
    code = f"from importlib.metadata import version; print(version({client.distribution!r}))"
    command = [str(_python(environment)), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_job(client: ClientJob, environment: Path, base: str, timeout_s: float, result: ClientResult) -> None:
    """Run a client's script and take the results that it prints."""
    variables = job_environment(base)
    if client.is_node:
        for file in JOBS.glob("*.mjs"):
            shutil.copy(file, environment)
    try:
        command = client.program(environment)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=variables, check=False)
        output, errors = done.stdout, done.stderr
        if done.returncode:
            result.problem = f"the job ended with status {done.returncode}: {errors.strip().splitlines()[-1:]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        result.problem = f"the job took more than {timeout_s:.0f} s"
    for line in output.splitlines():
        if line.startswith(MARK):
            found = json.loads(line.removeprefix(MARK))
            result.checks[found["feature"]] = found["problem"]
            note(f"  {'works' if not found['problem'] else 'FAILS'}: {found['feature']} {found['problem']}")
    if result.problem:
        note(f"  FAILS: {result.problem}")


def job_environment(base: str) -> Mapping[str, str]:
    """Return the variables of a job: no access to the hub, no telemetry, no proxy for loopback."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own = {"EYAS_URL": base, "EYAS_MODEL": MODEL, "EYAS_TOKENIZER": str(ROOT / TARGET), "NO_PROXY": "127.0.0.1,localhost"}
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return kept | own | quiet


def summary(result: ClientResult) -> str:
    """Return a line about a client."""
    failed = sum(map(bool, result.checks.values()))
    state = result.problem or (
        f"{failed} of {len(result.checks)} checks failed" if failed else f"{len(result.checks)} checks"
    )
    return f"{result.client.name} {result.version}: {state} ({result.seconds:.0f} s)"


def page(results: Sequence[ClientResult]) -> str:
    """Return the text of tests/clients/README.md."""
    lines = [
        "# Clients",
        "",
        "`make clients` installs each client into an environment of its own, runs a small job of it against",
        "`eyas serve` with the demo model, and writes this page. `make clients CLIENTS=guidellm` runs one. The",
        f"jobs are in [tests/clients/jobs](jobs). Eyas {__version__}, on a CPU.",
        "",
        "| client | version | run | what works | what does not |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        works = "; ".join(feature for feature, problem in result.checks.items() if not problem)
        fails = [f"{feature} ({problem})" for feature, problem in result.checks.items() if problem]
        fails += [result.problem] * bool(result.problem)
        named = f"{result.client.name}: {result.client.what}"
        reasons = FOLDERS.sub("", "; ".join(fails))
        row = (named, result.version, result.date, works, reasons)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
