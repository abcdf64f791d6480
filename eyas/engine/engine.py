"""The engine: requests in, chunks out, one step at a time. Knows no network, and not which drafter it has."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.engine.drafting import Drafting, noise_key
from eyas.engine.runner import ModelRunner
from eyas.engine.sampling import Draw, sample
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import Batch
from eyas.engine.verify import Accepted, accept
from eyas.errors import InvalidRequest
from eyas.request import Chunk, Request
from eyas.tree import DraftTree


@dataclass(frozen=True)
class Load:
    """How busy an engine is. free_slots: token slots that no running request may come to need."""

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
        chunks = self._scheduler.reap()
        batch = self._scheduler.schedule()
        if batch.works:
            trees = self._drafting.propose(batch)
            logits = self._runner.forward(batch, trees)
            tokens = sample(logits, _draws(batch, trees))
            accepted = _accept(batch, trees, tokens)
            chunks += self._scheduler.commit(batch, trees, accepted)
        self._drafting.release([chunk.request_id for chunk in chunks if chunk.finish_reason])
        return chunks

    def submit(self, request: Request) -> None:
        """Queue a request whose seed is fixed. Raises InvalidRequest if it can never be served, Overloaded if the queue
        is full."""
        request.sampling.validate()
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
        """Assert the integrity of slots and owners. Valid between steps."""
        self._scheduler.check()


def _draws(batch: Batch, trees: list[DraftTree]) -> list[Draw]:
    """Who draws each row of logits: a node at depth d below position p guesses position p + d + 1."""
    draws = []
    for work, tree in zip(batch.works, trees, strict=True):
        if work.emits:
            key, last = noise_key(work.sequence.request), work.first
            depths = (len(work.slots) - 1,) if work.prefill else tree.depths
            draws += [Draw(key, last + depth + 1) for depth in depths]
    return draws


def _accept(batch: Batch, trees: list[DraftTree], tokens: list[int]) -> list[Accepted | None]:
    """Walk every tree with its own samples; None for a prompt chunk that is not the last."""
    accepted: list[Accepted | None] = []
    row = 0
    for work, tree in zip(batch.works, trees, strict=True):
        tree = DraftTree.root_only(0) if work.prefill else tree
        count = len(tree) if work.emits else 0
        work.sequence.samples = tuple(tokens[row : row + count])
        accepted.append(accept(tree, work.sequence.samples) if count else None)
        row += count
    return accepted
