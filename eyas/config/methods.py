"""Settings that one drafting method has and others do not, as frozen values. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.config.checks import at_least


@dataclass(frozen=True)
class SmallConfig:
    """Settings of a small draft model. Its slots, noise and laws are set by EagleConfig, as of every drafter with a law.

    chunk_tokens: most tokens that one of its forward passes takes in; a longer prompt is prefilled in chunks.
    """

    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        at_least(1, chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True)
class MethodsConfig:
    """Settings that one drafting method has and others do not."""

    small: SmallConfig = field(default_factory=SmallConfig)
