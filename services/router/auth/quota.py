"""Quotas of API keys: requests and tokens a minute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eyas.config.checks import at_least
from eyas.errors import InvalidRequest, RateLimited, TimedOut


@dataclass(frozen=True)
class KeyLimits:
    """Quota of a key; 0 sets no limit. Each router counts for itself.

    Attributes:
        requests_per_minute: generation requests; a rejected one counts too.
        tokens_per_minute: prompt and output tokens. A request reserves its max_tokens, and gives back what it does not use.
        max_running: completions that run or wait at once.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_running: int = 0

    def __post_init__(self) -> None:
        at_least(0, **vars(self))


class TokenBucket:
    """Bucket of an amount per minute, which comes back evenly. One that took more than there was waits until it is back.

    available: what can be taken now; below 0 after a request that took more than expected.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._updated = float(per_minute), clock()

    @property
    def available(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._updated) * self.per_minute / 60, float(self.per_minute))
        self._updated = now
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount; a negative one gives it back."""
        self._level = self.available - amount

    def seconds_until(self, amount: float) -> float:
        """Return seconds until an amount is there, or all of it if it is more than a minute's."""
        missing = min(amount, self.per_minute) - self.available
        return max(missing, 0.0) * 60 / self.per_minute if self.per_minute else 0.0

    def headers(self, kind: str) -> dict[str, str]:
        """Return OpenAI's headers about what is left; none without a limit."""
        if not self.per_minute:
            return {}
        name, left = "x-ratelimit-{}-" + kind, max(math.floor(self.available), 0)
        reset = _duration(self.seconds_until(self.per_minute))
        return {name.format("limit"): str(self.per_minute), name.format("remaining"): str(left), name.format("reset"): reset}


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 120ms, 7s or 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class Quota:
    """Usage of a key. It stays when the file of keys is read again."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.limits, self._clock = limits, clock
        self.requests = TokenBucket(limits.requests_per_minute, clock)
        self.tokens = TokenBucket(limits.tokens_per_minute, clock)
        self.num_running = 0

    def update(self, limits: KeyLimits) -> None:
        """Take other limits. A changed limit begins with a full minute."""
        if limits.requests_per_minute != self.limits.requests_per_minute:
            self.requests = TokenBucket(limits.requests_per_minute, self._clock)
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            self.tokens = TokenBucket(limits.tokens_per_minute, self._clock)
        self.limits = limits

    def count_request(self) -> None:
        """Count a request. Raises RateLimited."""
        self._require(self.requests, 1, "requests")
        self.requests.take(1)

    @contextmanager
    def reserve(self, num_completions: int, num_prompt: int, num_output: int) -> Iterator[Callable[[int], None]]:
        """Reserve what a request needs while the body runs; yields a function that counts its output tokens.

        Raises RateLimited, or InvalidRequest if the request alone is above max_running.

        Args:
            num_prompt, num_output: tokens of its prompts, and of its completions at most. A request without output that
                ends with a server's error gets all of them back. One that its client ends keeps paying for its prompts.
        """
        most = self.limits.max_running
        if most and num_completions > most:
            raise InvalidRequest(f"{num_completions} completions are asked for, but this key may run {most} at once", "n")
        if most and self.num_running + num_completions > most:
            message = f"{self.num_running} completions of this key are running, of {most} at once; try again when some end"
            raise RateLimited(message, 1.0, self.headers)
        self._require(self.tokens, num_prompt + num_output, "tokens")
        used, is_free, bucket = 0, False, self.tokens
        bucket.take(num_prompt + num_output)
        self.num_running += num_completions

        def count(num_tokens: int) -> None:
            nonlocal used
            used += num_tokens

        try:
            yield count
        except Exception as error:
            is_free = not used and not isinstance(error, TimedOut)  # a client may set a deadline before the first token
            raise
        finally:
            self.num_running -= num_completions
            bucket.take(-num_prompt - num_output if is_free else used - num_output)

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's headers about what is left."""
        return self.requests.headers("requests") | self.tokens.headers("tokens")

    def _require(self, bucket: TokenBucket, amount: int, kind: str) -> None:
        if seconds := bucket.seconds_until(amount):
            message = f"the quota of this key, {bucket.per_minute} {kind} a minute, is used up; try again in {seconds:.1f} s"
            raise RateLimited(message, seconds, self.headers)
