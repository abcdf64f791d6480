"""What `eyas bench methods` measures: options in, checked settings and prompts by task out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from eyas.bench.workloads import Prompt
from eyas.config import Dtype, TreeConfig
from eyas.errors import ConfigError
from eyas.request import SamplingParams

ANY_TASK = "all"


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
    dtype: Dtype = "float32"
    device: str = "cpu"
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
    from eyas.text import load_tokenizer

    turns = entry.get("turns")
    text = turns[0] if isinstance(turns, list) else entry["text"]
    return tuple(load_tokenizer(target).encode(str(text)))
