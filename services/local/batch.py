"""`eyas run-batch FILE`: requests in OpenAI's batch format, answered by a model that is served meanwhile, or at a URL."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import httpx
import typer
from rich.console import Console

from eyas.cli import options
from eyas.errors import ConfigError, Unavailable
from eyas.progress import Progress
from eyas.services.local.cluster import POLL_INTERVAL_S, free_port, running_cluster
from eyas.services.local.serve import AssignmentsOption, Names, exit_on_error, plan_of_options, say_restart, wait_until_ready

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_TRIES = 6
RETRIED = frozenset({429, 502, 503, 504})
CONNECT_TIMEOUT_S = 10.0
# How each line of a response begins.
LINE_START = b'{"id": "batch_req_'
# Characters of a line that an error shows.
MAX_SHOWN = 80

Url = Annotated[str, typer.Option(help="Base URL of a server of OpenAI's API; without it, --model is served meanwhile.")]
LocalModel = Annotated[str, typer.Option(help="Folder or hub id of the model to serve while the file runs.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File of the responses; by default FILE with .out.jsonl at its end.")
]
Errors = Annotated[
    Path | None, typer.Option(help="File of the requests that failed; by default the output's name with .errors.jsonl.")
]
Concurrency = Annotated[int, typer.Option(min=1, help="Most requests that run at once.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin again instead of going on after the output's last line.")]


def run_batch(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON Lines with custom_id, method, url and body.")],
    config: options.ConfigFile = None,
    url: Url = "",
    model: LocalModel = "",
    output: Output = None,
    error_file: Errors = None,
    concurrency: Concurrency = 64,
    restart: Restart = False,
    api_key: options.ApiKey = "",
    served_model_name: Names = None,
    draft_model: options.DraftModel = "",
    method: options.Method = "",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = "",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    tokenizer: options.TokenizerOf = "",
    chat_template: options.Template = "",
    assignments: AssignmentsOption = None,
) -> None:
    """Answer the requests of FILE, which is in OpenAI's batch format, and write the responses as they come.

    A run that was interrupted goes on where it stopped; requests that failed are tried again. Exit status 1 if any failed.
    The options about weights, memory and drafting are for --model.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with exit_on_error(console):
        if bool(url) == bool(model):
            raise ConfigError("give either --url of a server, or --model to serve one meanwhile")
        if url:
            own = ("served_model_name", "draft_model", "method", *options.LLM_ARGUMENTS, "assignments")
            options.refuse_given(context, own, "the server at --url has that set")
        files = BatchFiles.of(file, output, error_file)
        earlier = files.read(restart)
        with _server(console, url, model, context) as (base, tend):
            counts = asyncio.run(answer_all(files, earlier, base, api_key, concurrency, console, tend))
    num_before = len(earlier.ids)
    print(f"{counts.num_done} answered, {counts.num_failed} failed, {num_before} were there before: {files.output}")
    if counts.num_failed:
        print(f"the failed ones are in {files.errors}")
        raise typer.Exit(1)


@contextmanager
def _server(console: Console, url: str, model: str, context: typer.Context) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the URL of the server that answers, and a function that tends its processes, see `Cluster.tend`.

    A model is served in the body's time.
    """
    if url:
        yield url.rstrip("/").removesuffix("/v1"), lambda: None
        return
    with running_cluster(plan_of_options(context), free_port()) as cluster:
        wait_until_ready(console, cluster)
        yield cluster.http, partial(cluster.tend, partial(say_restart, console))


@dataclass(frozen=True)
class EarlierRun:
    """The responses of a run that goes on: their ids, and the bytes of their lines."""

    ids: frozenset[str] = frozenset()
    num_bytes: int = 0


@dataclass(frozen=True)
class BatchFiles:
    """The requests, the responses, and the requests that failed."""

    requests: Path
    output: Path
    errors: Path

    @classmethod
    def of(cls, requests: Path, output: Path | None, errors: Path | None) -> BatchFiles:
        """Name the files that are not named. Raises ConfigError for names that are equal, and a file that is not there."""
        output = output or _with_end(requests, ".out.jsonl")
        errors = errors or _with_end(output, ".errors.jsonl")
        if len({path.resolve() for path in (requests, output, errors)}) < 3:
            raise ConfigError(f"{requests}, {output} and {errors} must be three files; name others")
        if not requests.is_file():
            raise ConfigError(f"cannot read {requests}: there is no such file")
        for path in (output, errors):
            if not path.parent.is_dir():
                raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        return cls(requests, output, errors)

    def read(self, restart: bool) -> EarlierRun:
        """Return what goes on, and write nothing. Raises ConfigError for files that hold something else."""
        for path in (self.output, self.errors):
            _check_first_line(path)
        if restart or not self.output.exists():
            return EarlierRun()
        ids, num_bytes = set[str](), 0
        with self.output.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                num_bytes += len(line)
                if not line.strip():
                    continue
                if (found := _parsed_line(line)) is None or not isinstance(found["custom_id"], str):
                    shown = line[:MAX_SHOWN].decode(errors="replace")
                    raise ConfigError(
                        f"{self.output} holds no responses of a batch: {shown!r}; name another, or add --restart"
                    )
                ids.add(found["custom_id"])
        return EarlierRun(frozenset(ids), num_bytes)

    def begin(self, earlier: EarlierRun) -> None:
        """Keep the earlier responses only: a last line that was cut is removed, and earlier failures are forgotten."""
        with self.output.open("ab") as file:
            file.truncate(earlier.num_bytes)
        self.errors.write_bytes(b"")


def _with_end(path: Path, end: str) -> Path:
    return path.with_name(path.name.removesuffix(".jsonl") + end)


def _check_first_line(path: Path) -> None:
    """Raise ConfigError for a file that another than `eyas run-batch` wrote: it would be lost."""
    if not path.exists():
        return
    with path.open("rb") as file:
        line = file.readline()
    is_cut = not line.endswith(b"\n") and line[: len(LINE_START)] == LINE_START[: len(line)]
    if not is_cut and _parsed_line(line) is None:
        shown = line[:MAX_SHOWN].decode(errors="replace")
        raise ConfigError(f"{path} holds no responses of a batch: {shown!r}; name another file, or remove this one")


def _parsed_line(line: bytes) -> dict[str, Any] | None:
    """Return a line of responses or errors; None if it is something else."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and {"custom_id", "response"} <= found.keys():
            return found
    return None


@dataclass(frozen=True)
class BatchRequest:
    """A line of the file. problem: why it cannot be sent; empty for one that can."""

    custom_id: str | None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass
class BatchCounts:
    """Counts of the requests that are sent, of those that have a response, and of failed ones."""

    num_requests: int = 0
    num_done: int = 0
    num_failed: int = 0

    def show(self, shown: Progress) -> None:
        """Show how far the requests are."""
        failed = f"{self.num_failed} failed, " if self.num_failed else ""
        shown.show(f"{failed}requests", self.num_done + self.num_failed, self.num_requests)


def read_requests(lines: Iterable[str], done: frozenset[str] = frozenset()) -> Iterator[BatchRequest]:
    """Yield the requests of a batch, without those in `done`. A line that is no request yields its problem."""
    seen = set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _parsed(line, number)
        if request.custom_id in done:
            continue
        if request.custom_id is not None and request.custom_id in seen:
            request = BatchRequest(
                request.custom_id, problem=f"line {number}: custom_id {request.custom_id!r} is there twice"
            )
        elif request.custom_id is not None:
            seen.add(request.custom_id)
        yield request


def _parsed(line: str, number: int) -> BatchRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        return BatchRequest(None, problem=f"line {number} is no JSON object: {line.strip()[:MAX_SHOWN]}")
    name, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(name, str) or not name:
        return BatchRequest(None, problem=f"line {number} has no custom_id; give each request a text of its own")
    problem = ""
    if entry.get("method", "POST") != "POST":
        problem = f"method is {str(entry['method'])[:MAX_SHOWN]!r}; it must be POST"
    elif url not in ENDPOINTS:
        problem = f"url is {str(url)[:MAX_SHOWN]!r}; it must be one of {', '.join(ENDPOINTS)}"
    elif not isinstance(body, dict):
        problem = "body is missing; give the request as an object"
    elif body.get("stream"):
        problem = "stream is set; a batch holds whole responses, leave it out"
    if problem:
        return BatchRequest(name, problem=f"line {number}: {problem}")
    assert isinstance(body, dict)
    return BatchRequest(name, str(url), body)


async def answer_all(
    files: BatchFiles,
    earlier: EarlierRun,
    base: str,
    api_key: str,
    concurrency: int,
    console: Console,
    tend: Callable[[], object] = lambda: None,
) -> BatchCounts:
    """Send the requests that are left, `concurrency` at once, and write each response as it comes.

    tend: called every POLL_INTERVAL_S seconds; raises Unavailable if the server's processes ended.

    Raises Unavailable if nothing answers at `base`, and ConfigError for a base that is no URL.
    """
    counts, headers = BatchCounts(), {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    client = _client(base, headers, limits)
    async with client:
        await _check_reachable(client, base)
        files.begin(earlier)
        with files.requests.open(encoding="utf-8-sig", errors="replace") as lines:
            counts.num_requests = sum(1 for line in lines if line.strip()) - len(earlier.ids)
        with (
            files.requests.open(encoding="utf-8-sig", errors="replace") as lines,
            files.output.open("a") as output,
            files.errors.open("a") as errors,
        ):
            requests = read_requests(lines, earlier.ids)
            with Progress(console) as shown:
                counts.show(shown)
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tending = tasks.create_task(_repeat(tend))
                        work = partial(_work, requests, client, counts, shown, output, errors)
                        await asyncio.wait([tasks.create_task(work()) for _ in range(concurrency)])
                        tending.cancel()
                except ExceptionGroup as group:
                    raise group.exceptions[0] from None
    return counts


def _client(base: str, headers: dict[str, str], limits: httpx.Limits) -> httpx.AsyncClient:
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    try:
        return httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, limits=limits)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url is {base!r}: {error}; give one such as http://127.0.0.1:8000") from None


async def _check_reachable(client: httpx.AsyncClient, base: str) -> None:
    try:
        await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise Unavailable(f"cannot reach {base}: {error}; check that a server listens there") from error


async def _repeat(call: Callable[[], object]) -> None:
    """Call a function again and again."""
    while True:
        call()
        await asyncio.sleep(POLL_INTERVAL_S)


async def _work(
    requests: Iterator[BatchRequest],
    client: httpx.AsyncClient,
    counts: BatchCounts,
    shown: Progress,
    output: IO[str],
    errors: IO[str],
) -> None:
    """Take requests until there are none left."""
    for request in requests:
        line = await _answer(request, client)
        has_failed = line["error"] is not None or line["response"]["status_code"] != 200
        file = errors if has_failed else output
        file.write(json.dumps(line) + "\n")
        file.flush()
        counts.num_failed += has_failed
        counts.num_done += not has_failed
        counts.show(shown)


async def _answer(request: BatchRequest, client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the line of a request's response or error."""
    line: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": None}
    if request.problem:
        return line | {"error": {"code": "invalid_request", "message": request.problem}}
    try:
        response = await _post(request, client)
    except (httpx.HTTPError, ValueError, RecursionError) as error:
        code = "connection_error" if isinstance(error, httpx.HTTPError) else "invalid_request"
        return line | {"error": {"code": code, "message": f"{type(error).__name__}: {error}"}}
    body: Any = {"error": {"message": response.text[:MAX_SHOWN]}}
    problem = (
        {"code": "invalid_response", "message": "the answer is no JSON object"} if response.status_code == 200 else None
    )
    with suppress(ValueError, RecursionError):
        body = response.json()
        problem = problem if not isinstance(body, dict) else None
    answer = {"status_code": response.status_code, "request_id": response.headers.get("x-request-id", ""), "body": body}
    return line | {"response": answer, "error": problem}


async def _post(request: BatchRequest, client: httpx.AsyncClient) -> httpx.Response:
    """Send a request; again where the server is busy or away for a while, and at once says when."""
    content = json.dumps(request.body)
    for attempt in range(MAX_TRIES):
        is_last, wait_s = attempt == MAX_TRIES - 1, 0.5 * 2**attempt
        try:
            response = await client.post(request.url, content=content, headers={"Content-Type": "application/json"})
        except httpx.TransportError:
            if is_last:
                raise
        else:
            if response.status_code not in RETRIED or is_last:
                return response
            with suppress(ValueError):
                wait_s = max(0.0, min(60.0, float(response.headers.get("retry-after", ""))))
        await asyncio.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")
