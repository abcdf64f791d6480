"""What the benchmarks measure and plan with: checked settings, prompts from a file, and what a drafter achieves."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from eyas.api.request import SamplingParams
from eyas.config import DraftBudgetPolicy, Dtype, TreeConfig
from eyas.config.checks import above_zero, at_least, one_of, require
from eyas.emulation.costs import DeviceCosts
from eyas.errors import ConfigError

Prompt = tuple[int, ...]

NUM_RANDOM_PROMPTS = 8
NUM_RANDOM_TOKENS = 64
ANY_TASK = "all"
# As in drafters: nodes that are sent before commits, of all sessions together and at least of each.
MAX_PREPARED_NODES, MIN_PREPARED_NODES = 16384, 256


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What every benchmark has. threads: CPU threads of torch; 0 takes what `eyas.device.placement.use_threads` says."""

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
    """What `eyas bench offline` measures.

    draft_model: folder or hub id of a draft head; empty measures plain decoding alone.
    prompts: JSON Lines file with token_ids or text; None takes seeded random tokens.
    num_prompts: of them, spread evenly over the tasks; 0 takes all of a file, or NUM_RANDOM_PROMPTS random ones.
    num_groups: fewest batches of each size. max_groups: most; 0 takes as many as all prompts need.
    rows: lengths of the chains that a verify step is timed with, and draft rounds; empty times none.
    first_token: also measure the time to the first token of a long prompt, new and cached.
    """

    model: str
    draft_model: str = ""
    method: str = ""
    prompts: Path | None = None
    num_prompts: int = 0
    batches: tuple[int, ...] = (1, 8)
    num_groups: int = 5
    max_groups: int = 0
    rows: tuple[int, ...] = ()
    first_token: bool = False
    draft_budget: DraftBudgetPolicy = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (min(self.batches, default=0), min(self.rows, default=1), self.num_groups)
        require(min(sizes) >= 1, "batch, rows and groups must be 1 or more, and given at least once")
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
    """What `eyas bench methods` measures. `tree` is for methods without a tree shape of their own.

    prompts: JSON Lines file with token_ids, text or the turns of Spec-Bench (the first is used), and a category or task.
    assistant: small model for transformers' assisted generation; empty leaves it out.
    """

    model: str
    methods: tuple[MethodSpec, ...]
    prompts: Path
    num_prompts: int = 20
    assistant: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclass(frozen=True)
class Foreseen:
    """What trees that grow ahead are good for.

    hits: share of outcomes that have a tree. prepared: share of those whose tree is there before the commit.
    missing_levels: levels that trees lack because fewer rows grew them than where a profile was measured.
    """

    hits: float
    prepared: float
    missing_levels: float = 0.0


@dataclass(frozen=True)
class AcceptanceProfile:
    """What a drafter achieves, for `eyas plan`, and what a step costs besides passes.

    fresh: weights of steps that accept 0, 1, 2 ... drafted tokens, with trees drafted on demand. hit, miss: the same while
    drafting ahead, of trees grown in advance and of others. hit_rate: share of the former, measured where a drafter had the
    time to grow the share `grown` of its levels during a pass, by `ahead_rows` rows for each sequence (0: not known).
    prepared: share of the steps whose tree came before the commit, so that they need no round trip; a part of hit_rate.
    0: every step waits for an answer.
    hit_rounds, miss_rounds: time of the drafter for other hits, and for misses, in rounds on demand.
    num_nodes, num_levels, top_k: of trees, the root counted as a node. ahead_top_k: rows of a pass in
    advance; of one-pass heads nodes with a block. one_pass: whether a pass drafts all levels.
    host_ms: of the verifier in each step. wire_ms: of a round trip besides the delay. draft_host_ms: of the drafter in a
    round. hit_ms: until a drafter answers with a tree that it has.
    """

    fresh: tuple[float, ...]
    hit: tuple[float, ...] = ()
    miss: tuple[float, ...] = ()
    hit_rate: float = 0.0
    grown: float = 1.0
    ahead_rows: float = 0.0
    prepared: float = 0.0
    hit_rounds: float = 0.0
    miss_rounds: float = 1.0
    num_nodes: int = 24
    num_levels: int = 5
    top_k: int = 8
    ahead_top_k: int = 16
    host_ms: float = 0.0
    wire_ms: float = 0.0
    draft_host_ms: float = 0.0
    hit_ms: float = 0.0
    one_pass: bool = False

    def __post_init__(self) -> None:
        for name, weights in (("fresh", self.fresh or (0,)), ("hit", self.hit or (1,)), ("miss", self.miss or (1,))):
            require(sum(weights) > 0 and min(weights) >= 0, f"{name} is {weights}; it must have a weight above 0")
        require(bool(self.hit) or not self.hit_rate, f"hit_rate is {self.hit_rate}, so hit must have weights")
        at_least(1, num_nodes=self.num_nodes, num_levels=self.num_levels, top_k=self.top_k)
        above_zero(grown=self.grown)
        at_least(0, ahead_rows=self.ahead_rows)
        at_least(0, prepared=self.prepared, hit_rounds=self.hit_rounds, miss_rounds=self.miss_rounds)
        require(
            self.prepared <= self.hit_rate <= 1 or not self.prepared,
            f"prepared is {self.prepared} and hit_rate {self.hit_rate}; prepared trees are hits, so it cannot be higher",
        )
        at_least(0, host_ms=self.host_ms, wire_ms=self.wire_ms, draft_host_ms=self.draft_host_ms, hit_ms=self.hit_ms)

    @property
    def tau(self) -> float:
        """Tokens of a step with a fresh tree, the bonus token included."""
        return mean_tokens(self.fresh)

    @property
    def grows_on(self) -> bool:
        """Whether trees ahead go on growing from round to round: a slow drafter has shorter ones, not fewer."""
        return self.prepared > 0 and not self.one_pass

    def grown_s(self, costs: DeviceCosts, num_sessions: int) -> float:
        """Seconds in which a drafter grows trees of sessions in advance: new tokens, and passes for all levels or one."""
        if self.one_pass:
            rows = num_sessions * (self.num_nodes + self.ahead_top_k * self.num_levels)
            return costs.seconds("draft_extend", num_sessions) + costs.seconds("draft_round", rows)
        return costs.seconds("draft_round", num_sessions) + self.num_levels * self.ahead_level_s(costs, num_sessions)

    def ahead_level_s(self, costs: DeviceCosts, num_sessions: int) -> float:
        """Seconds of a pass that grows trees in advance."""
        return costs.seconds("draft_level", num_sessions * self.pass_rows(costs, num_sessions))

    def pass_rows(self, costs: DeviceCosts, num_sessions: int) -> float:
        """Rows of a session in a pass that grows trees in advance. Sessions share them; they are no more than are free."""
        return min(self.ahead_top_k, max(costs.free_rows("draft_level") / num_sessions, 1.0))

    def measured_on(self, drafter: DeviceCosts, pass_s: float, num_sessions: int) -> AcceptanceProfile:
        """The same, measured where a drafter grew trees of sessions during a verify pass of `pass_s` seconds."""
        grown_s, level_s = self.grown_s(drafter, num_sessions), self.ahead_level_s(drafter, num_sessions)
        rows = self.pass_rows(drafter, num_sessions) * pass_s / level_s if level_s else 0.0
        return replace(self, grown=min(pass_s / grown_s, 1.0) if grown_s else 1.0, ahead_rows=rows)

    @property
    def exponent(self) -> float:
        """Of the law by which trees miss outcomes: of n nodes, n ** -exponent. So hit_rate is that of ahead_rows nodes."""
        is_known = self.ahead_rows > 1 and 0 < self.hit_rate < 1
        return -math.log(1 - self.hit_rate) / math.log(self.ahead_rows) if is_known else 0.0

    def foreseen(self, drafter: DeviceCosts, grown: float, num_passes: float, num_sessions: int) -> Foreseen:
        """What trees foresee that a drafter has grown since the last commits.

        An outcome that has a share of the chances gets as large a share of the nodes. It is a hit if that is a node or more,
        and its tree is the deeper the more there are. Each session has an equal part of the nodes that are sent; drafters
        send no part that is too small.

        Args:
            drafter: its cost table.
            grown: the share of their levels that it could grow.
            num_passes: the passes that it could run.
            num_sessions: of this drafter.
        """
        if not self.grows_on:
            share = min(grown / self.grown, 1.0)
            return Foreseen(self.hit_rate * share, self.prepared * share)
        num_nodes, sent = num_passes * self.pass_rows(drafter, num_sessions), MAX_PREPARED_NODES / num_sessions
        num_sent = min(num_nodes, sent) if sent >= MIN_PREPARED_NODES else 0.0
        levels = self.exponent * mean_tokens(self.hit) * math.log(self._thinner(num_nodes))
        return Foreseen(self._share(self.hit_rate, num_nodes), self._share(self.prepared, num_sent), levels)

    def _share(self, share: float, num_nodes: float) -> float:
        """What a share of outcomes, as measured, is with trees of num_nodes."""
        return max(1 - (1 - share) * self._thinner(num_nodes) ** self.exponent, 0.0) if num_nodes >= 1 else 0.0

    def _thinner(self, num_nodes: float) -> float:
        """How many times as many rows trees had where they were measured; at least 1."""
        return max(self.ahead_rows / max(num_nodes, 1.0), 1.0)

    def with_host(self, scale: float, wire_ms: float | None = None) -> AcceptanceProfile:
        """The same acceptance on hosts whose times are multiplied: 0 for none. wire_ms: of another wire, as it is."""
        times = {name: scale * getattr(self, name) for name in ("host_ms", "wire_ms", "draft_host_ms", "hit_ms")}
        return replace(self, **(times if wire_ms is None else {**times, "wire_ms": wire_ms}))


def mean_tokens(weights: Sequence[float]) -> float:
    """Tokens of a step with such weights, the bonus token included."""
    return 1 + sum(accepted * weight for accepted, weight in enumerate(weights)) / sum(weights)


def load_profile(file: Path, temperature: float) -> AcceptanceProfile:
    """The profile in a JSON file, or that of a temperature in a report of `eyas bench split`. Raises ConfigError."""
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        results = data.get("results", {})
        own = results["profiles"][f"{temperature:g}"] if results else data
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
        profile = AcceptanceProfile(**fields)
        serial = [r for r in results.get("results", ()) if (r["mode"], r["temperature"]) == ("serial", temperature)]
        if serial and not profile.ahead_rows:  # of an older report
            drafter = DeviceCosts.from_json(results["drafter"])
            profile = profile.measured_on(drafter, 1e-3 * serial[0]["verify_ms"], serial[0]["batch"])
        return profile
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read a profile for temperature {temperature:g} from {file}: {error!r}") from error


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes in seconds, and its sizes in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def poisson(rate: float, seconds: float, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[Arrival]:
    """Arrivals at `rate` a second on average; sizes are those given."""
    above_zero(rate=rate)
    source = random.Random(seed)
    moments = accumulate(source.expovariate(rate) for _ in count())
    return [Arrival(moment, prompt_tokens, output_tokens) for moment in takewhile(lambda moment: moment < seconds, moments)]


def read_trace(file: Path) -> list[Arrival]:
    """Arrivals from JSON Lines with at_s, prompt_tokens and output_tokens. Raises ConfigError."""
    try:
        return [Arrival(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        reason = f"cannot read arrivals from {file}: {error!r}; give at_s, prompt_tokens and output_tokens"
        raise ConfigError(reason) from error
