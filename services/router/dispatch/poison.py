"""Requests that end verifiers: found by trying a suspect alone, refused, and remembered for some time.

A request is a suspect once its verifier was lost, or stuck in a step, before the first chunk. Others that waited there are
suspects too, so each is tried again on a verifier to which this router sends nothing else meanwhile. The one that loses
that verifier as well is to blame.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

from eyas.errors import PoisonRequest
from eyas.rpc.messages import GenerateCall

# How long a suspect waits for a verifier of its own, and how long it has it at most.
ISOLATION_S = 5.0
REFUSAL_S = 600.0
MAX_REFUSED = 1024
# Sampling parameters that one of n completions has by itself.
_OF_ONE_COMPLETION = frozenset({"n", "stop", "seed", "prompt_logprobs"})

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Attempt:
    """A call on a verifier until its first chunk.

    Attributes:
        body: the client's request; its completions are never tried at the same time.
        trial_until: end of the time for which the verifier takes no other call of this router, by the detector's clock; 0
            for a call that is not tried.
        is_alone: no other call of this router has waited for its first chunk there since the call was sent.
        has_begun: the first chunk has come.
    """

    incarnation: str
    body: object
    trial_until: float = 0.0
    is_alone: bool = False
    has_begun: bool = False


class PoisonDetector:
    """Detector that tries suspects, each alone on a verifier, and remembers the requests that it refused.

    on_change: called when a verifier takes calls again, or may have become free for a trial.
    """

    def __init__(self, on_change: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._attempts: dict[str, set[Attempt]] = {}
        self._trials: dict[str, Attempt] = {}
        self._refused: OrderedDict[bytes, float] = OrderedDict()

    def closed(self) -> frozenset[str]:
        """Return the incarnations of the verifiers on which a suspect is tried now."""
        now = self._clock()
        return frozenset(name for name, trial in self._trials.items() if now < trial.trial_until)

    def is_tried(self, body: object) -> bool:
        """Return whether a completion of a client's request is tried now."""
        now = self._clock()
        return any(trial.body is body and now < trial.trial_until for trial in self._trials.values())

    @contextmanager
    def attempt(self, incarnation: str, body: object, is_suspect: bool) -> Iterator[Attempt]:
        """Follow a call from before it is sent. A suspect closes its verifier if no other is tried there."""
        attempt = Attempt(incarnation, body)
        if trial := self._trials.get(incarnation):
            trial.is_alone = False
        elif is_suspect and not self.is_tried(body):
            attempt.trial_until = self._clock() + ISOLATION_S
            self._trials[incarnation] = attempt
        self._attempts.setdefault(incarnation, set()).add(attempt)
        try:
            yield attempt
        finally:
            self._end(attempt)

    def isolate(self, attempt: Attempt) -> bool:
        """Return whether a suspect is the only one that waits for its first chunk; from then on others are noticed."""
        attempt.is_alone = len(self._attempts[attempt.incarnation]) == 1
        if attempt.is_alone:
            attempt.trial_until = self._clock() + ISOLATION_S
        return attempt.is_alone

    def begin(self, attempt: Attempt) -> None:
        """Note that a call has its first chunk, which shows that the verifier survives it."""
        attempt.has_begun = True
        self._end(attempt)

    def refuse(self, call: GenerateCall, attempt: Attempt, lost: Sequence[str]) -> PoisonRequest:
        """Remember a request that has lost verifiers, and return its error. lost: their addresses.

        The verifier of its last attempt stays closed for a moment, so that no completion of the same body is tried before
        the error has ended them all.
        """
        digest = request_digest(call)
        now = self._clock()
        attempt.trial_until = now + ISOLATION_S
        self._trials[attempt.incarnation] = attempt
        self._refused[digest] = now + REFUSAL_S
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        message = "refused request %s of tenant %r: it lost the verifiers %s before its first token; digest %s"
        values = call.request.id, call.request.tenant, ", ".join(lost), digest.hex()
        log.error(message, *values)  # each one: a client cannot repeat it without two more verifiers
        return _poison_request()

    def check(self, call: GenerateCall) -> None:
        """Raises PoisonRequest for a request equal to one that was refused in the last REFUSAL_S seconds."""
        now = self._clock()
        while self._refused and next(iter(self._refused.values())) <= now:
            self._refused.popitem(last=False)
        if self._refused and (digest := request_digest(call)) in self._refused:
            message = "refused request %s of tenant %r: it equals one that lost two verifiers; digest %s"
            log.warning(message, call.request.id, call.request.tenant, digest.hex(), extra={"rate_limited": True})
            raise _poison_request()

    def _end(self, attempt: Attempt) -> None:
        """Follow a call no longer. Does nothing the second time."""
        waiting = self._attempts.get(attempt.incarnation, set())
        waiting.discard(attempt)
        if not waiting:
            self._attempts.pop(attempt.incarnation, None)
        now = self._clock()
        self._trials = {
            name: trial
            for name, trial in self._trials.items()
            if trial is not attempt and (name in self._attempts or now < trial.trial_until)
        }
        if self._trials or attempt.trial_until:
            self._on_change()


def request_digest(call: GenerateCall) -> bytes:
    """Return a digest of all that decides how a verifier computes a request, its random draws excepted."""
    request = call.request
    sampling = {name: value for name, value in vars(request.sampling).items() if name not in _OF_ONE_COMPLETION}
    digest = blake2b(array("q", request.prompt_ids), digest_size=16)
    digest.update(f"{call.model} {request.num_draft_tokens} {sampling}".encode())
    return digest.digest()


def _poison_request() -> PoisonRequest:
    return PoisonRequest(
        "this request is refused: two verifiers were lost, one after the other, while they worked on its first token. The "
        f"same request is refused for {REFUSAL_S / 60:.0f} minutes; the router's log names it"
    )
