"""`eyas bench split`: verifiers and draft services as processes on emulated devices, with a delaying proxy between them.

Plain decoding, serial drafting and drafting ahead take turns on the verifiers; each kind of drafting has a draft service.
"""

from __future__ import annotations

import itertools
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from statistics import fmean
from typing import Annotated, cast

import grpc
import typer
from grpc_health.v1 import health_pb2_grpc

from eyas.api.request import Request, SamplingParams
from eyas.bench.report import Report
from eyas.bench.settings import MethodSpec, Prompt, groups, load_tasks
from eyas.bench.split import (
    MODES,
    Decoded,
    Mode,
    Shares,
    SplitResult,
    SplitResults,
    SplitSettings,
    Timeline,
    agreement,
    draw,
    profile_of,
    result,
    typical,
    with_references,
)
from eyas.bench.timing import rotated
from eyas.cli.bench import RESULTS
from eyas.client import Client
from eyas.config import DraftAheadConfig, TreeConfig
from eyas.drafters.registry import default_method, resolve_tree
from eyas.emulation.costs import DeviceCosts
from eyas.emulation.device import PassRecord
from eyas.errors import EyasError, Unavailable
from eyas.progress import Progress, progress
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.services.local.cluster import START_TIMEOUT_S, Child, ServiceSettings, free_port, is_serving

POLL_S = 0.1
WARM_UP_TOKENS = 8
WARM_UP_TIMEOUT_S = 300.0
CHUNK_BYTES = 65536
MAX_CHUNKS = 256
# Verify passes between the first requests of two verifiers: no simple fraction, so that their steps do not fall together.
STAGGER = 0.3819


@dataclass(eq=False)
class DelayingProxy:
    """A TCP proxy on loopback before the service at `port`: each piece of data arrives `delay_s` after it was sent.

    Pieces follow one another without waiting for each other, as on a long wire. A way holds MAX_CHUNKS of them at most.
    num_bytes: what has gone to the service.
    """

    port: int
    delay_s: float = 0.0
    num_bytes: int = 0
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _ends: list[socket.socket] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def start(self) -> None:
        """Accept connections until `close`."""
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for end in (self.listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        """Connect every caller to the service; one that cannot be is closed, and the next can try."""
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return  # the proxy is closed
            try:
                self._connect(caller)
            except OSError:
                caller.close()

    def _connect(self, caller: socket.socket) -> None:
        service = socket.create_connection(("127.0.0.1", self.port))
        self._ends += [caller, service]
        for source, sink in ((caller, service), (service, caller)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            way: Queue[tuple[float, bytes]] = Queue(MAX_CHUNKS)
            threading.Thread(target=self._read, args=(source, way, sink is service), daemon=True).start()
            threading.Thread(target=self._write, args=(sink, way), daemon=True).start()

    def _read(self, source: socket.socket, way: Queue[tuple[float, bytes]], is_request: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self.num_bytes += len(data) if is_request else 0
                way.put((time.perf_counter() + self.delay_s, data))
        way.put((0.0, b""))

    def _write(self, sink: socket.socket, way: Queue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while (piece := way.get())[1]:
                due, data = piece
                time.sleep(max(due - time.perf_counter(), 0.0))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Split:
    """Running services. clients, verifiers, verifier_logs: one of each verifier, with its log of passes.

    proxies, children, logs: of the drafter of each mode with drafts, which all verifiers share.
    stagger_s: time between the first requests of two verifiers.
    """

    clients: tuple[Client, ...]
    verifiers: tuple[Child, ...]
    verifier_logs: tuple[Path, ...]
    proxies: Mapping[Mode, DelayingProxy]
    children: Mapping[Mode, Child]
    logs: Mapping[Mode, Path]
    stagger_s: float

    def decode(self, mode: Mode, prompt: Prompt, sampling: SamplingParams, request_id: str, verifier: int = 0) -> Decoded:
        """Decode one prompt. Raises EyasError."""
        drafter = self.proxies[mode].address if mode in self.proxies else NO_DRAFTER
        request = Request(request_id, prompt, sampling, return_verify_steps=True)
        tokens, steps, started = list[int](), [], 0.0
        for chunk in self.clients[verifier].chunks(GenerateCall(request, drafter=drafter)):
            tokens += chunk.chunk.token_ids
            started = started or (time.perf_counter() if tokens else 0.0)
            steps += [chunk.chunk.verify_step] if chunk.chunk.verify_step else []
        return Decoded(tuple(tokens), tuple(steps), started, time.perf_counter())

    def decode_group(
        self, mode: Mode, group: Sequence[Prompt], sampling: SamplingParams, verifier: int = 0
    ) -> list[Decoded]:
        """Decode prompts at once on a verifier; prompt i draws with seed i."""
        with ThreadPoolExecutor(len(group)) as pool:
            calls = [
                pool.submit(self.decode, mode, prompt, replace(sampling, seed=seed), f"{mode}-{seed}", verifier)
                for seed, prompt in enumerate(group)
            ]
            return [call.result() for call in calls]

    def decode_on_all(
        self, mode: Mode, batches: Sequence[Sequence[Prompt]], sampling: SamplingParams, verifiers: int
    ) -> list[list[list[Decoded]]]:
        """Decode each group on every verifier: at a time each has another one, and they do not begin in step.

        Returns groups in their order, by verifier.
        """

        def decode(verifier: int) -> list[list[Decoded]]:
            order = [(verifier + turn) % len(batches) for turn in range(len(batches))]
            time.sleep(self.stagger_s * verifier)
            found = {index: self.decode_group(mode, batches[index], sampling, verifier) for index in order}
            return [found[index] for index in range(len(batches))]

        with ThreadPoolExecutor(verifiers) as pool:
            return list(pool.map(decode, range(verifiers)))

    def check(self) -> None:
        """Raises Unavailable with the reason if a service has ended."""
        for child in (*self.verifiers, *self.children.values()):
            child.check()


def read_log(file: Path) -> list[PassRecord]:
    """The passes that an emulated device has logged."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [PassRecord(**json.loads(line)) for line in lines]


@contextmanager
def running_split(settings: SplitSettings, costs: Mapping[str, DeviceCosts], method: str) -> Iterator[Split]:
    """Start the services of the settings, and stop them at the end. Raises Unavailable if one does not start."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eyas-split-")))
        proxies, children, logs = dict[Mode, DelayingProxy](), dict[Mode, Child](), dict[Mode, Path]()
        for mode in (mode for mode in settings.modes if mode != "plain"):
            ahead = settings.ahead if mode == "ahead" else DraftAheadConfig(mode="never")
            shape = ",".join(f"{key}: {value}" for key, value in vars(ahead).items())
            logs[mode] = folder / f"{mode}.log"
            table = written(costs["drafter"], folder / f"{mode}.json", logs[mode])
            port = free_port()
            more: tuple[str, ...] = (f"drafting.emulated_device={table}", f"drafting.draft_ahead={{{shape}}}")
            children[mode] = started("draft", port, settings, method, folder / f"{mode}.out", more)
            stack.callback(stop, children[mode])
            proxies[mode] = DelayingProxy(port)
            stack.enter_context(closing(proxies[mode]))
            proxies[mode].start()
        addresses = ",".join(f"'{proxy.address}'" for proxy in proxies.values())
        pass_s = costs["verifier"].seconds("verify", 1)
        more = (
            f"engine.max_num_seqs={max(settings.batches)}",
            "engine.prefix_cache=false",
            "engine.draft_budget=fixed",
            "validate_head=never",
            f"draft_client.draft_timeout_s={max(5.0, 20 * pass_s)}",
            f"discovery.drafters=[{addresses}]",
        )
        verifiers, verifier_logs = list[Child](), list[Path]()
        for number in range(max(settings.verifiers)):
            verifier_logs.append(folder / f"verifier-{number}.log")
            table = written(costs["verifier"], folder / f"verifier-{number}.json", verifier_logs[-1])
            own, out = (*more, f"engine.emulated_device={table}"), folder / f"verifier-{number}.out"
            verifiers.append(started("verifier", free_port(), settings, method, out, own))
            stack.callback(stop, verifiers[-1])
        clients = tuple(stack.enter_context(Client(child.address)) for child in verifiers)
        split = Split(clients, tuple(verifiers), tuple(verifier_logs), proxies, children, logs, STAGGER * pass_s)
        for child in (*children.values(), *verifiers):
            wait_until_serving(split, child)
        yield split


def written(costs: DeviceCosts, table: Path, log: Path) -> Path:
    """A table in a file, with a log."""
    replace(costs, log=str(log)).write(table)
    return table


def started(name: str, port: int, settings: SplitSettings, method: str, out: Path, more: Sequence[str]) -> Child:
    """Start a service on the models of the settings."""
    tree = ", ".join(f"{key}: {value}" for key, value in vars(settings.tree).items())
    own = (
        "served_model_name=split",
        f"model={settings.model}",
        f"draft_model={settings.draft_model}",
        f"method={method}",
        f"tree={{{tree}}}",
        f"dtype={settings.dtype}",
        f"device={settings.device}",
        f"threads={settings.threads}",
        f"server.port={port}",
        "discovery.kind=static",
    )
    service = ServiceSettings(name, None, (*own, *more))
    return Child(name, f"127.0.0.1:{port}", service.command(), out)


def stop(child: Child) -> None:
    """End a service, by force after a while."""
    child.process.terminate()
    child.wait_or_kill(time.monotonic() + child.stop_timeout_s)


def wait_until_serving(split: Split, child: Child) -> None:
    """Raises Unavailable if a service ends, or is not ready in time."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with open_sync_channel(child.address) as channel:
        while not is_serving(health_pb2_grpc.HealthStub(channel)):
            split.check()
            if time.monotonic() > deadline:
                lines = "\n".join(child.last_log_lines(5))
                raise Unavailable(f"the {child.name} service is not ready after {START_TIMEOUT_S:.0f} s; it says:\n{lines}")
            time.sleep(POLL_S)


def warm_up(split: Split, prompt: Prompt) -> None:
    """Decode with every drafter until trees come. Raises Unavailable if none do."""
    sampling = SamplingParams(WARM_UP_TOKENS, 0.0, ignore_eos=True)
    deadline = time.monotonic() + WARM_UP_TIMEOUT_S
    for mode, number in itertools.product(split.proxies, range(len(split.verifiers))):
        last = "the requests ended without trees"
        while True:
            try:
                if any(s.drafted for s in split.decode(mode, prompt, replace(sampling, seed=0), "warm-up", number).steps):
                    break
            except (EyasError, grpc.RpcError) as error:
                last = repr(error)
            split.check()
            if time.monotonic() > deadline:
                lines = "\n".join(split.verifiers[number].last_log_lines(5))
                raise Unavailable(f"no draft tree came in mode {mode}: {last}; the verifier says:\n{lines}")
            time.sleep(POLL_S)


def measure(settings: SplitSettings, progress: Progress) -> tuple[SplitResults, list[Timeline]]:
    """Measure every temperature, batch, delay and number of verifiers. Raises EyasError."""
    method = default_method(settings.methods[0].name, settings.draft_model)
    costs = {name: DeviceCosts.read(getattr(settings, name)).scaled(settings.scale) for name in ("verifier", "drafter")}
    prompts = [task.token_ids for task in load_tasks(settings)]
    results: list[SplitResult] = []
    timelines: list[Timeline] = []
    axes = settings.temperatures, settings.batches, settings.delays, settings.verifiers
    firsts = tuple(axis[0] for axis in axes[1:])
    progress.show("starting the services")
    with running_split(settings, costs, method) as split:
        warm_up(split, prompts[0])
        for temperature, batch, delay, verifiers in itertools.product(*axes):
            for proxy in split.proxies.values():
                proxy.delay_s = delay * costs["verifier"].seconds("verify", 1)
            runs = run_modes(split, settings, groups(prompts, batch, 1), temperature, verifiers, progress)
            cell = temperature, batch, delay
            found = [summary(split, mode, cell, own) for mode, own in runs.items()]
            plain = [group for own in runs.get("plain", []) for group in own]
            agreed = [agreement([group for own in runs[r.mode] for group in own], plain) if plain else "" for r in found]
            results += with_references([replace(r, identical=text) for r, text in zip(found, agreed, strict=True)])
            if (batch, delay, verifiers) == firsts:
                timelines += timelines_of(split, {mode: own[0] for mode, own in runs.items()}, temperature)
    prompt_tokens = round(fmean(map(len, prompts)))
    whole = SplitResults(tuple(results), costs["verifier"], costs["drafter"], prompt_tokens, settings.max_tokens, {})
    profiles = {f"{temperature:g}": profile_of(settings, whole, temperature) for temperature in settings.temperatures}
    return replace(whole, profiles=profiles), timelines


def run_modes(
    split: Split,
    settings: SplitSettings,
    batches: Sequence[Sequence[Prompt]],
    temperature: float,
    verifiers: int,
    progress: Progress,
) -> dict[Mode, list[list[list[Decoded]]]]:
    """Decode every group of prompts in every mode, by verifier. One verifier alone has all modes of a group in turn."""
    runs: dict[Mode, list[list[list[Decoded]]]] = {mode: [[] for _ in range(verifiers)] for mode in settings.modes}
    sampling, label = settings.sampling(temperature), f"temperature {temperature:g}, batch {len(batches[0])}"
    few = replace(sampling, max_tokens=settings.plain_tokens or settings.max_tokens)
    parts = [[group] for group in batches] if verifiers == 1 else [batches]
    for index, part in enumerate(progress.track(parts, f"{label}, {verifiers} verifiers")):
        for mode in rotated(list(settings.modes), index):
            found = split.decode_on_all(cast(Mode, mode), part, few if mode == "plain" else sampling, verifiers)
            for own, more in zip(runs[cast(Mode, mode)], found, strict=True):
                own += more
            split.check()
    return runs


def summary(
    split: Split, mode: Mode, cell: tuple[float, int, float], found: Sequence[Sequence[Sequence[Decoded]]]
) -> SplitResult:
    """The result of a mode, with the passes that its devices have logged. found: groups by verifier."""
    drafter = read_log(split.logs[mode]) if mode in split.logs else []
    shares, seconds = list[Shares](), list[float]()
    for log, own in zip(split.verifier_logs, found, strict=False):
        verifier = read_log(log)
        for group in own:
            started, ended = min(r.started for r in group), max(r.ended for r in group)
            shares.append(Shares.between(started, ended, verifier, drafter))
            seconds += [r.ended - r.began for r in verifier if started <= r.launched <= ended]
    mean = Shares(*(fmean(getattr(each, name) for each in shares) for name in ("verifier", "drafter", "late")))
    return result(mode, *cell, [group for own in found for group in own], mean, fmean(seconds), len(found))


def timelines_of(split: Split, runs: Mapping[Mode, list[list[Decoded]]], temperature: float) -> list[Timeline]:
    """The rounds of a typical request of each mode with drafts."""
    verifier = read_log(split.verifier_logs[0])
    return [
        Timeline.of(
            f"{mode}, temperature {temperature:g}",
            typical([r for group in runs[mode] for r in group]),
            verifier,
            read_log(log),
        )
        for mode, log in split.logs.items()
    ]


def split(
    model: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    draft_model: Annotated[str, typer.Option(help="Folder or hub id of a draft head.")],
    prompts: Annotated[Path, typer.Option(help="JSON Lines with token_ids, text or turns.")],
    method: Annotated[str, typer.Option(help="Drafting method; by default the one that the draft model is for.")] = "",
    verifier: Annotated[str, typer.Option(help="Cost table of the verifier's device, see docs/split.md.")] = "60ms",
    drafter: Annotated[str, typer.Option(help="Cost table of the drafter's device.")] = "6ms",
    scale: Annotated[float, typer.Option(help="All times are multiplied by it; a busy machine needs more.")] = 1.0,
    delay: Annotated[list[float], typer.Option(help="Delay of each way, in verify passes; may be repeated.")] = [0.0],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Prompts decoded at once; may be repeated.")] = [1],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="Temperature, 0 for greedy; may be repeated.")] = [0.0, 1.0],  # noqa: B006
    verifiers: Annotated[list[int], typer.Option(help="Verifiers that share the draft service; may be repeated.")] = [1],  # noqa: B006
    mode: Annotated[list[str], typer.Option(help="plain, serial and ahead; may be repeated.")] = list(MODES),  # noqa: B006
    num_prompts: Annotated[int, typer.Option(help="How many prompts to decode.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 64,
    plain_tokens: Annotated[int, typer.Option(help="Tokens for each prompt in plain decoding; 0 takes --max-tokens.")] = 0,
    num_draft_tokens: Annotated[int, typer.Option(help="Most nodes of a draft tree.")] = TreeConfig.num_draft_tokens,
    num_steps: Annotated[int, typer.Option(help="Levels of a draft tree; 0 takes those of the method.")] = 0,
    top_k: Annotated[int, typer.Option(help="Nodes that each level expands.")] = TreeConfig.top_k,
    ahead_top_k: Annotated[int, typer.Option(help="Rows of a session in a pass ahead, or blocks.")] = 64,
    ahead_steps: Annotated[int, typer.Option(help="Deepest level that drafting ahead grows.")] = DraftAheadConfig.num_steps,
    threads: Annotated[int, typer.Option(help="CPU threads of each service.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = RESULTS,
) -> None:
    """Measure verifiers and draft service as processes on emulated devices; write a table and a timeline."""
    settings = SplitSettings(
        model=model,
        methods=(MethodSpec(method, draft_model),),
        prompts=prompts,
        num_prompts=num_prompts,
        draft_model=draft_model,
        verifier=verifier,
        drafter=drafter,
        scale=scale,
        batches=tuple(batch),
        delays=tuple(delay),
        verifiers=tuple(verifiers),
        modes=cast(tuple[Mode, ...], tuple(mode)),
        ahead=DraftAheadConfig(top_k=ahead_top_k, num_steps=ahead_steps, mode="always"),
        plain_tokens=plain_tokens,
        max_tokens=max_tokens,
        temperatures=tuple(temperature),
        tree=TreeConfig(num_draft_tokens, num_steps, top_k),
        dtype="float32",
        device="cpu",
        threads=threads,
    )
    name = default_method(method, draft_model)
    settings = replace(settings, methods=(MethodSpec(name),), tree=resolve_tree(settings.tree, name, draft_model))
    with progress() as shown:
        results, timelines = measure(settings, shown)
    page = Report.here("split", "eyas", "cpu", settings, results, results.tables()).publish(out)
    draw(timelines, (page.with_suffix(".png"), page.with_suffix(".svg")))
    print(f"drawn as {page.with_suffix('.png')} and .svg")
