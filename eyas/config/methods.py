"""Settings of single drafting methods as frozen values. A value out of range raises ConfigError. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.errors import ConfigError


@dataclass(frozen=True)
class PromptLookupConfig:
    """Prompt lookup: what followed the last tokens where they stood before in the same context.

    longest, shortest: tokens of the context that are looked for. num_matches: most places that go into a tree.
    num_tokens: tokens remembered for all sessions, about 1 KB each; the session unused for longest is forgotten beyond that.
    """

    longest: int = 6
    shortest: int = 1
    num_matches: int = 12
    num_tokens: int = 2**20

    def __post_init__(self) -> None:
        _at_least(1, shortest=self.shortest, num_matches=self.num_matches, num_tokens=self.num_tokens)
        _at_least(self.shortest, longest=self.longest)


@dataclass(frozen=True)
class RestConfig:
    """Retrieval from a datastore (REST): what followed the last tokens in a corpus.

    datastore: folder that `eyas datastore build` wrote; left out, `head` names it.
    longest, shortest: tokens of the context that are looked for. num_matches: most places that go into a tree.
    num_sessions: sessions remembered; the one unused for longest is forgotten beyond that.
    """

    datastore: str = ""
    longest: int = 16
    shortest: int = 2
    num_matches: int = 96
    num_sessions: int = 2**14

    def __post_init__(self) -> None:
        _at_least(1, shortest=self.shortest, num_matches=self.num_matches, num_sessions=self.num_sessions)
        _at_least(self.shortest, longest=self.longest)


@dataclass(frozen=True)
class LookaheadConfig:
    """Lookahead decoding.

    window: columns of the Jacobi window; ngram: tokens of an n-gram, so that the window has ngram - 1 rows.
    num_guesses: most n-grams that are verified in a round, and most that are kept for each first token.
    num_tokens: tokens in the n-grams of all sessions; the session unused for longest is forgotten beyond that.
    """

    window: int = 4
    ngram: int = 4
    num_guesses: int = 6
    num_tokens: int = 2**21

    def __post_init__(self) -> None:
        _at_least(1, window=self.window, num_guesses=self.num_guesses, num_tokens=self.num_tokens)
        _at_least(2, ngram=self.ngram)


@dataclass(frozen=True)
class UnionConfig:
    """Two drafters at once.

    floor: share of a tree's guesses that either drafter has for certain, if it has so many; the rest goes by score.
    num_sessions: sessions remembered; the one unused for longest is forgotten beyond that.
    """

    floor: float = 0.125
    num_sessions: int = 2**14

    def __post_init__(self) -> None:
        _at_least(1, num_sessions=self.num_sessions)
        if not 0 <= self.floor <= 0.5:
            raise ConfigError(f"floor is {self.floor}; it must lie in [0, 0.5]")


@dataclass(frozen=True)
class MethodsConfig:
    """Settings that one drafting method has and others do not."""

    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    rest: RestConfig = field(default_factory=RestConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    union: UnionConfig = field(default_factory=UnionConfig)


def _at_least(least: int, **settings: int) -> None:
    for name, value in settings.items():
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
