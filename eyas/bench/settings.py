"""Checked settings of the benchmarks, and prompts from a file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eyas.api.request import SamplingParams
from eyas.config import DraftBudgetPolicy, Dtype, TreeConfig
from eyas.config.checks import at_least, one_of, require
from eyas.errors import ConfigError

Prompt = tuple[int, ...]

NUM_RANDOM_PROMPTS = 8
NUM_RANDOM_TOKENS = 64
ANY_TASK = "all"


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings that every benchmark has. threads: CPU threads of torch; 0 takes what `eyas.device.placement.use_threads`
    says.
    """

    max_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0,)
    tree: TreeConfig = field(default_factory=TreeConfig)
    dtype: Dtype = "auto"
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        require(
            self.max_tokens >= 2,
            f"max_tokens is {self.max_tokens}; it must be at least 2, or no decode step is left to measure",
        )
        one_of(Dtype, dtype=self.dtype)

    def sampling(self, temperature: float) -> SamplingParams:
        """Generate exactly max_tokens, also past an end-of-sequence token."""
        return SamplingParams(self.max_tokens, temperature, ignore_eos=True)


@dataclass(frozen=True)
class OfflineSettings(BenchSettings):
    """Settings of `eyas bench offline`.

    Attributes:
        draft_model: folder or hub id of a draft head; empty measures plain decoding alone.
        prompts: JSON Lines file with token_ids or text; None takes seeded random tokens.
        num_prompts: of them, spread evenly over the tasks; 0 takes all of a file, or NUM_RANDOM_PROMPTS random ones.
        num_groups: fewest batches of each size.
        max_groups: most; 0 takes as many as all prompts need.
    """

    model: str
    draft_model: str = ""
    method: str = ""
    prompts: Path | None = None
    num_prompts: int = 0
    batches: tuple[int, ...] = (1, 8)
    num_groups: int = 5
    max_groups: int = 0
    draft_budget: DraftBudgetPolicy = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (min(self.batches, default=0), self.num_groups)
        require(min(sizes) >= 1, "batch and groups must be 1 or more, and given at least once")
        at_least(0, num_prompts=self.num_prompts)
        one_of(DraftBudgetPolicy, draft_budget=self.draft_budget)


@dataclass(frozen=True)
class MethodSpec:
    """A drafting method. draft_model: folder, hub id or file that it loads; empty for a method that loads nothing."""

    name: str
    draft_model: str = ""

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Read "name" or "name=draft_model"."""
        name, _, draft_model = text.partition("=")
        return cls(name, draft_model)


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt and its kind of task."""

    task: str
    token_ids: Prompt


@dataclass(frozen=True)
class MethodsSettings(BenchSettings):
    """Settings of `eyas bench methods`. `tree` is for methods without a tree shape of their own.

    Attributes:
        prompts: JSON Lines file with token_ids, text or the turns of Spec-Bench (the first is used), and a category or
            task.
        assistant: small model for transformers' assisted generation; empty leaves it out.
        draft_budget: fixed grows the whole tree in each step; adaptive leaves out what does not pay, as serving does.
        processor_time: count the seconds that processors work, not those that pass. For busy machines without a GPU.
        generates: also measure transformers' `generate`, alone and with its prompt lookup.
        quantization: see `EngineConfig`; it is not transformers'.
    """

    model: str
    methods: tuple[MethodSpec, ...]
    prompts: Path
    num_prompts: int = 20
    assistant: str = ""
    draft_budget: DraftBudgetPolicy = "fixed"
    processor_time: bool = False
    generates: bool = True
    quantization: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(DraftBudgetPolicy, draft_budget=self.draft_budget)
        require(
            self.generates or not self.assistant,
            f"assistant is {self.assistant}, for transformers' generate, which is not to run; leave one of the two out",
        )
        require(bool(self.methods and self.temperatures), "give at least one method and one temperature")
        require(self.num_prompts >= 1, f"num_prompts is {self.num_prompts}; it must be at least 1")


def load_prompts(settings: OfflineSettings, vocab_size: int) -> list[Prompt]:
    """Read the prompts of the settings' file, or make random ones. Raises ConfigError for a file without prompts."""
    if settings.prompts is None:
        num_prompts = settings.num_prompts or NUM_RANDOM_PROMPTS
        return [random_prompt(vocab_size, NUM_RANDOM_TOKENS, seed) for seed in range(num_prompts)]
    prompts = _read_prompts(settings.prompts, settings.model)
    return [prompt.token_ids for prompt in _spread(prompts, settings.num_prompts or len(prompts))]


def load_tasks(settings: MethodsSettings) -> list[TaskPrompt]:
    """Take the first prompts of each task, as evenly as `num_prompts` allows. Raises ConfigError for a file without any."""
    return _spread(_read_prompts(settings.prompts, settings.model), settings.num_prompts)


def _spread(prompts: Sequence[TaskPrompt], num_prompts: int) -> list[TaskPrompt]:
    seen: Counter[str] = Counter()
    ranks = []
    for index, prompt in enumerate(prompts):
        ranks.append((seen[prompt.task], index))
        seen[prompt.task] += 1
    return [prompts[index] for index in sorted(index for _, index in sorted(ranks)[:num_prompts])]


def random_prompt(vocab_size: int, length: int, seed: int) -> Prompt:
    """Draw `length` tokens; the same seed gives the same tokens."""
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())


def groups(prompts: Sequence[Prompt], batch: int, at_least: int) -> list[list[Prompt]]:
    """Batches that use every prompt; after the last prompt they start again with the first."""
    count = max(math.ceil(len(prompts) / batch), at_least)
    return [[prompts[(group * batch + i) % len(prompts)] for i in range(batch)] for group in range(count)]


def _read_prompts(file: Path, model: str) -> list[TaskPrompt]:
    """Read JSON Lines; text is encoded with the tokenizer of `model`. Raises ConfigError."""
    try:
        entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [
            TaskPrompt(str(entry.get("task") or entry.get("category") or ANY_TASK), _token_ids(entry, model))
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read prompts from {file}: {error!r}") from error
    if not prompts:
        raise ConfigError(f"{file} holds no prompts; write one JSON object with token_ids or text on each line")
    return prompts


def _token_ids(entry: dict[str, object], model: str) -> Prompt:
    given = entry.get("token_ids")
    if isinstance(given, list):
        return tuple(int(token) for token in given)
    from eyas.text.tokenizer import load_tokenizer

    turns = entry.get("turns")
    text = turns[0] if isinstance(turns, list) else entry["text"]
    return tuple(load_tokenizer(model).encode(str(text)))
