"""The engine: requests in, chunks out, one step at a time. Knows no network, and not which drafter it has."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from eyas.engine.drafting import Drafting, noise_key
from eyas.engine.runner import ModelRunner
from eyas.engine.sampling import Draw, sample
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import Work
from eyas.engine.verify import Accepted, accept
from eyas.errors import InvalidRequest
from eyas.request import Chunk, Request
from eyas.tree import DraftTree


@dataclass(frozen=True)
class Load:
    """How busy an engine is. free_slots: token slots that no running request holds; cached prefixes may fill
    them, and give way at need."""

    num_running: int
    num_waiting: int
    free_slots: int


class Engine:
    """Continuous batching of requests over one target. Not safe for use from several threads."""

    def __init__(self, scheduler: Scheduler, drafting: Drafting, runner: ModelRunner, context_length: int) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._runner = runner
        self.context_length = context_length

    def step(self) -> list[Chunk]:
        """Advance every running request by one forward pass; new tokens, and final chunks of those that ended."""
        chunks = self.reap()
        works = self._scheduler.schedule(self._drafting.collect())
        if works:
            logits = self._runner.forward(works)
            tokens = sample(logits, _draws(works))
            accepted = _accept(works, tokens, self.vocab_size)
            committed = self._scheduler.commit(works, accepted)
            self._drafting.release([chunk.request_id for chunk in committed if chunk.finish_reason])
            chunks += committed
        self._drafting.ask(self._scheduler.running, self._scheduler.budget)
        return chunks

    def submit(self, request: Request) -> None:
        """Queue a request whose seed is fixed. Raises InvalidRequest if it can never be served, Overloaded if the queue
        is full."""
        request.validate()
        if request.sampling.seed is None:
            raise InvalidRequest("the request has no seed; SamplingParams.seeded() draws one")
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if total > self.context_length:
            raise InvalidRequest(
                f"prompt of {len(request.prompt_ids)} tokens and max_tokens {request.sampling.max_tokens} exceed the "
                f"context length {self.context_length}; shorten one of them"
            )
        for what, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.sampling.stop_token_ids)):
            outside = [token for token in ids if not 0 <= token < self.vocab_size]
            if outside:
                raise InvalidRequest(f"{what} holds token id {outside[0]}, outside the vocabulary [0, {self.vocab_size})")
        self._scheduler.add(request)

    def reap(self) -> list[Chunk]:
        """Drop cancelled requests and free all that they hold; one final chunk each. `step` begins with it."""
        chunks = self._scheduler.reap()
        self._drafting.release([chunk.request_id for chunk in chunks])
        return chunks

    def cancel(self, request_id: str) -> None:
        """End a request; the next step yields its final chunk and frees everything. Unknown ids are ignored."""
        self._scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work

    @property
    def load(self) -> Load:
        return Load(self._scheduler.num_running, self._scheduler.num_waiting, self._scheduler.num_free)

    @property
    def vocab_size(self) -> int:
        return self._runner.target.vocab_size

    def check(self) -> None:
        """Assert the integrity of slots, owners and cached prefixes. Valid between steps."""
        self._scheduler.check()


def _draws(works: Seq[Work]) -> list[Draw]:
    """Who draws each row of logits."""
    return [Draw(noise_key(work.sequence.request), position) for work in works for position in work.drawn]


def _accept(works: Seq[Work], tokens: Seq[int], vocab_size: int) -> list[Accepted | None]:
    """Walk every tree with its own samples; None for a prompt chunk that is not the last. A sample outside the vocabulary
    stands for logits that are not numbers: it fails its sequence."""
    accepted: list[Accepted | None] = []
    row = 0
    for work in works:
        samples = tuple(tokens[row : row + len(work.drawn)])
        tree = work.tree or DraftTree.root_only(work.sequence.tokens[-1])
        outcome = accept(tree, samples) if samples else None
        if outcome is not None and outcome.tokens[-1] >= vocab_size:
            work.sequence.failure = "the target gave logits that are not numbers; its weights or dtype do not work here"
        accepted.append(outcome)
        work.sequence.samples = samples if work.tree is not None else ()
        row += len(samples)
    return accepted
