"""Clients that send many or few requests, and verifiers (in the soak drafters too) that scale out and in with load."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eyas import LLM, SamplingParams
from tests.services.ray.cluster.application import RayApplication
from tests.support.services.grpc_client import generate

WORKERS = ("Verifier", "Draft")
# Of the client that asks seldom. The pool of verifiers on a slow machine shrinks between two of its requests.
SHORT_TOKENS, PAUSE_S = 4, 9.0
# Of each of many clients while a worker starts: they keep it wanted, and leave most of the processor to its start.
STARTING_TOKENS, STARTING_PAUSE_S = 24, 2.0


@dataclass(frozen=True)
class Asked:
    """A request and its output under plain decoding."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: tuple[int, ...]

    def first(self, num_tokens: int) -> Asked:
        """The same for fewer tokens."""
        return Asked(self.prompt, replace(self.sampling, max_tokens=num_tokens), self.expected[:num_tokens])


def plainly(model: Path, num_requests: int, max_tokens: int) -> list[Asked]:
    """Requests with seeds of their own, decoded plainly in this process."""
    prompts = [tuple(row) for row in np.random.default_rng(0).integers(3, 48, (num_requests, 16)).tolist()]
    samplings = [
        SamplingParams(max_tokens=max_tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(num_requests)
    ]
    results = LLM(str(model)).generate(prompts, samplings)
    return [Asked(p, s, tuple(r.outputs[0].token_ids)) for p, s, r in zip(prompts, samplings, results, strict=True)]


class Load:
    """Clients that send one request after the other until the body ends, and count the outcomes.

    pause: between two requests of a client, in seconds. Like asked it may change. failures: of any kind, also wrong tokens.
    """

    def __init__(self, address: str, asked: Sequence[Asked], num_clients: int, pause: float = 0.0) -> None:
        self._address, self.asked, self.pause = address, asked, pause
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(num_clients)]
        self.num_answered = 0
        self.num_drafted = 0
        self.failures: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        while not self._over.wait(self.pause):
            asked = self.asked[number % len(self.asked)]
            number += 1
            try:
                out = generate(self._address, asked.prompt, asked.sampling)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            self.num_answered += 1
            self.num_drafted += out.stats.num_drafted
            if tuple(out.token_ids) != asked.expected:
                self.failures.append(f"{out.token_ids} instead of {asked.expected}")


@dataclass(frozen=True)
class Outcome:
    """What the clients saw while replicas came and went."""

    num_answered: int
    num_drafted: int
    failures: list[str]


def scale_out_and_in(
    application: RayApplication,
    asked: Sequence[Asked],
    largest: Sequence[int] = (2, 1),
    starting_pause: float = STARTING_PAUSE_S,
) -> Outcome:
    """Load until there are `largest` workers that serve, then one client that asks seldom, until one each does.

    largest: replicas of WORKERS under load; by default drafters do not scale, as `running_application` allows one.
    starting_pause: of the load while a worker starts; drafters, which count the time that they work, need 0.
    """
    short, brief = ([one.first(num_tokens) for one in asked] for num_tokens in (SHORT_TOKENS, STARTING_TOKENS))
    with Load(application.grpc, short, num_clients=1, pause=PAUSE_S) as quiet:
        with Load(application.grpc, asked, num_clients=6) as rush:

            def has_grown() -> bool:
                starts = starting_pause > 0 and not application.settled(*WORKERS)
                rush.asked, rush.pause = (brief, starting_pause) if starts else (asked, 0.0)
                return application.running(*WORKERS) == [*largest]

            application.wait(has_grown, 400, "the workers are too few")
            rush.asked, rush.pause, before = asked, 0.0, rush.num_answered
            application.wait(lambda: rush.num_answered > before + 4, 250, "the grown workers do not serve")
        application.wait(
            lambda: application.running(*WORKERS) == [1, 1] and application.settled(*WORKERS),
            250,
            "the workers are too many",
        )
        with Load(application.grpc, asked, num_clients=1) as last:
            application.wait(lambda: last.num_answered, 250, "the last workers do not serve")
    return seen(rush, quiet, last)


def upgrade(application: RayApplication, asked: Sequence[Asked]) -> Outcome:
    """A changed setting, deployed under load: every verifier is replaced by one that has it."""
    old = {lease.incarnation for lease in application.verifiers()}
    with Load(application.grpc, asked, num_clients=3) as load:
        application.wait(lambda: load.num_answered > 3, 150, "no request is answered")
        application.redeploy(lambda args: args["verifier"]["engine"].update(max_num_seqs=3))
        application.wait(lambda: replaced(application, old), 250, "the verifiers are not replaced")
        before = load.num_answered
        application.wait(lambda: load.num_answered > before + 4, 250, "the new verifiers do not serve")
    return seen(load)


def replaced(application: RayApplication, old: set[str]) -> bool:
    """Whether as many verifiers serve as before and none of them is old."""
    new = {lease.incarnation for lease in application.verifiers()}
    return len(new) == len(old) and not new & old and application.settled(*WORKERS)


def seen(*loads: Load) -> Outcome:
    """The outcome of all their requests."""
    return Outcome(
        sum(load.num_answered for load in loads),
        sum(load.num_drafted for load in loads),
        [failure for load in loads for failure in load.failures],
    )
