"""What the benchmarks measure: settings and a prompt file in, batches of token ids out. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import get_args

import numpy as np

from eyas.config import DraftBudgetPolicy, Dtype, TreeConfig
from eyas.errors import ConfigError
from eyas.request import SamplingParams

Prompt = tuple[int, ...]


NUM_RANDOM_PROMPTS = 8
NUM_RANDOM_TOKENS = 64
ANY_TASK = "all"


@dataclass(frozen=True)
class OfflineSettings:
    """What `eyas bench offline` measures.

    draft: folder or hub id of a draft head; empty measures plain decoding alone. prompts: JSON Lines with token_ids or
    text; None takes seeded random tokens. num_groups: fewest batches per batch size; each is decoded in every way.
    rows: sizes of the chains that a verify step is timed with. budget: of speculative decoding, as in EngineConfig.
    threads: of torch; 0 leaves its choice.
    """

    target: str
    draft: str = ""
    drafter: str = ""
    prompts: Path | None = None
    batches: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 96
    num_groups: int = 5
    rows: tuple[int, ...] = (1, 8, 16, 32, 64)
    tree: TreeConfig = field(default_factory=TreeConfig)
    budget: DraftBudgetPolicy = "fixed"
    dtype: Dtype = "auto"
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that nothing can be measured with."""
        if self.max_tokens < 2:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}; it must be at least 2, or no decode step is left to measure"
            )
        if min(self.batches, default=0) < 1 or min(self.rows, default=0) < 1 or self.num_groups < 1:
            raise ConfigError("batch, rows and groups must be 1 or more, and given at least once")
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype is {self.dtype}; known: {', '.join(get_args(Dtype))}")
        if self.budget not in get_args(DraftBudgetPolicy):
            raise ConfigError(f"budget is {self.budget}; known: {', '.join(get_args(DraftBudgetPolicy))}")

    def sampling(self, temperature: float) -> SamplingParams:
        """max_tokens exactly, whatever the model would like."""
        return SamplingParams(self.max_tokens, temperature, ignore_eos=True)


def load_prompts(settings: OfflineSettings, vocab_size: int) -> list[Prompt]:
    """The prompts of the settings' file, or random ones. Raises ConfigError for a file that holds none."""
    if settings.prompts is None:
        return [random_prompt(vocab_size, NUM_RANDOM_TOKENS, seed) for seed in range(NUM_RANDOM_PROMPTS)]
    try:
        entries = [json.loads(line) for line in settings.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [tuple(e["token_ids"]) if "token_ids" in e else _encode(e["text"], settings.target) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read prompts from {settings.prompts}: {error!r}") from error
    if not prompts:
        raise ConfigError(f"{settings.prompts} holds no prompts; give one JSON object with token_ids or text a line")
    return prompts


def random_prompt(vocab_size: int, length: int, seed: int) -> Prompt:
    """The same `length` tokens for the same seed."""
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())


def groups(prompts: Sequence[Prompt], batch: int, at_least: int) -> list[list[Prompt]]:
    """Batches that use every prompt, and start again from the first one where they run out."""
    count = max(ceil(len(prompts) / batch), at_least)
    return [[prompts[(group * batch + i) % len(prompts)] for i in range(batch)] for group in range(count)]


def _encode(text: str, target: str) -> Prompt:
    from eyas.tokenizer import load_tokenizer

    return tuple(load_tokenizer(target).encode(text))


@dataclass(frozen=True)
class MethodSpec:
    """A drafter by name. head: folder, hub id or file of what it loads; empty for one that loads nothing."""

    name: str
    head: str = ""

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Of "name" or "name=head"."""
        name, _, head = text.partition("=")
        return cls(name, head)


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt and what kind of task it stands for."""

    task: str
    token_ids: Prompt


@dataclass(frozen=True)
class MethodsSettings:
    """prompts: JSON Lines with token_ids, text or Spec-Bench's turns, whose first is taken, and a category or a task.
    tree: what methods grow that have no shape of their own. threads: of torch; 0 leaves its choice."""

    target: str
    methods: tuple[MethodSpec, ...]
    prompts: Path
    num_prompts: int = 20
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    max_tokens: int = 96
    tree: TreeConfig = field(default_factory=TreeConfig)
    dtype: Dtype = "auto"
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError where there is nothing to measure."""
        if not self.methods or not self.temperatures:
            raise ConfigError("give at least one method and one temperature")
        if self.max_tokens < 2 or self.num_prompts < 1:
            raise ConfigError("max_tokens must be at least 2 and the number of prompts at least 1")

    def sampling(self, temperature: float) -> SamplingParams:
        """max_tokens exactly, whatever the model would like."""
        return SamplingParams(self.max_tokens, temperature, ignore_eos=True)


def load_tasks(settings: MethodsSettings) -> list[TaskPrompt]:
    """The first prompts of each task, as evenly as `num_prompts` allows. Raises ConfigError for a file without any."""
    try:
        lines = settings.prompts.read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.strip()]
        tasks = [str(entry.get("task") or entry.get("category") or ANY_TASK) for entry in entries]
        turn = {task: [i for i, other in enumerate(tasks) if other == task] for task in dict.fromkeys(tasks)}
        order = sorted(range(len(entries)), key=lambda i: (turn[tasks[i]].index(i), i))[: settings.num_prompts]
        found = [TaskPrompt(tasks[i], _token_ids(entries[i], settings.target)) for i in sorted(order)]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read prompts from {settings.prompts}: {error!r}") from error
    if not found:
        raise ConfigError(f"{settings.prompts} holds no prompts; give one JSON object with token_ids or text a line")
    return found


def _token_ids(entry: dict[str, object], target: str) -> Prompt:
    given = entry.get("token_ids")
    if isinstance(given, list):
        return tuple(int(token) for token in given)
    from eyas.tokenizer import load_tokenizer

    turns = entry.get("turns")
    text = turns[0] if isinstance(turns, list) else entry["text"]
    return tuple(load_tokenizer(target).encode(str(text)))
