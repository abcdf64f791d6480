"""Verifiers and draft services as processes on emulated devices, with a delaying proxy between them."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc

from benchmarks.split.delaying_proxy import DelayingProxy
from benchmarks.split.results import Decoded, Mode, SplitSettings
from eyas.api.request import Request, SamplingParams
from eyas.bench.settings import Prompt
from eyas.client import Client
from eyas.config import DraftAheadConfig
from eyas.emulation.costs import DeviceCosts
from eyas.emulation.device import PassRecord
from eyas.errors import EyasError, Unavailable
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.services.local.cluster import START_TIMEOUT_S, Child, ServiceSettings, free_port, is_serving, stop_children

POLL_S = 0.1
WARM_UP_TOKENS = 8
WARM_UP_TIMEOUT_S = 300.0
# Verify passes between the first requests of two verifiers: no simple fraction, so that their steps do not fall together.
STAGGER = 0.3819


@dataclass(frozen=True)
class Split:
    """Running services.

    Attributes:
        clients, verifiers, verifier_logs: one of each verifier, with its log of passes.
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
    """Return the passes that an emulated device has logged."""
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
            stack.callback(stop_children, [children[mode]])
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
            stack.callback(stop_children, verifiers[-1:])
        clients = tuple(stack.enter_context(Client(child.address)) for child in verifiers)
        split = Split(clients, tuple(verifiers), tuple(verifier_logs), proxies, children, logs, STAGGER * pass_s)
        for child in (*children.values(), *verifiers):
            wait_until_serving(split, child)
        yield split


def written(costs: DeviceCosts, table: Path, log: Path) -> Path:
    """Return a table in a file, with a log."""
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
