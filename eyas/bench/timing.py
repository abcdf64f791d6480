"""The contenders of a benchmark, and a clock for the stages of a step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.bench.report import Spread
from eyas.bench.results import Run, StageTimes
from eyas.bench.settings import Prompt
from eyas.drafters.base import NO_WORK, DraftWork, LocalDrafter
from eyas.engine.engine import Engine
from eyas.engine.sequence import ScheduledSequence
from eyas.errors import CheckpointError
from eyas.models.checkpoint import resolve
from eyas.progress import Progress

STAGES = ("drafts", "schedule", "inputs", "forward", "sample", "commit", "request")

WARM_UP_TOKENS = 16
LOOKUP_TOKENS = 10  # drafted in a step by prompt lookup of transformers, as in its documentation


# A clock.
Seconds = Callable[[], float]


class Contender(Protocol):
    """Something that decodes a batch."""

    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Run:
        """Decode all prompts as one batch; prompt i draws with seed i."""
        ...


class EngineContender:
    """An Eyas engine, with or without a drafter.

    Args:
        drafter: the engine's, if its time is measured.
        clock: seconds; by default those that pass.
    """

    def __init__(
        self, engine: Engine, device: torch.device, drafter: LocalDrafter | None = None, clock: Seconds | None = None
    ) -> None:
        self.engine = engine
        self.now = clock or partial(now, device)
        self._drafter = drafter

    @property
    def work(self) -> DraftWork:
        """Return what a round of the drafter runs."""
        return self._drafter.work if self._drafter else NO_WORK

    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Run:
        outputs: list[tuple[int, ...]] = [()] * len(prompts)
        stats = GenerationStats()
        marks: list[float] = []  # start and end of each call of the drafter

        def mark(*_: object) -> None:
            marks.append(self.now())

        started = self.now()
        for index, prompt in enumerate(prompts):
            self.engine.submit(Request(f"{index}", prompt, replace(sampling, seed=index)))
        with _marked(self._drafter, "propose", mark, mark) if self._drafter else nullcontext():
            while self.engine.has_work:
                for chunk in self.engine.step():
                    outputs[int(chunk.request_id)] += chunk.token_ids
                    stats.add(chunk)
        return Run(self.now() - started, tuple(outputs), stats, sum(marks[1::2]) - sum(marks[::2]))


class GenerateContender:
    """`generate` of transformers over a left-padded batch, greedy, with its default attention and cache."""

    def __init__(self, model: str, dtype: str, device: torch.device, clock: Seconds | None = None) -> None:
        """Raises CheckpointError when transformers cannot load the model. clock: as of EngineContender."""
        self.now = clock or partial(now, device)
        self._model = _load_for_generate(model, dtype, device)
        self._drafting: dict[str, Any] = {}  # options of `generate`
        self._dtype, self._device = dtype, device

    def assisted(self, assistant: str) -> GenerateContender:
        """Return the same model with transformers' assisted generation: a small model drafts, by its defaults. For batches
        of one.

        Raises CheckpointError when transformers cannot load the assistant.
        """
        contender = copy.copy(self)
        contender._drafting = {"assistant_model": _load_for_generate(assistant, self._dtype, self._device)}
        return contender

    def with_lookup(self) -> GenerateContender:
        """Return the same model with transformers' prompt lookup, by its defaults. For batches of one."""
        contender = copy.copy(self)
        contender._drafting = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        return contender

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Run:
        assert sampling.temperature == 0, "generate draws other noise than the engine"
        started = self.now()
        longest = max(map(len, prompts))
        ids = self._tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = self._tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"max_new_tokens": sampling.max_tokens, **self._drafting}
        out = self._model.generate(input_ids=ids, attention_mask=mask, **options)
        outputs = tuple(map(tuple, out[:, longest:].tolist()))
        return Run(self.now() - started, outputs, GenerationStats())

    def _tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self._device)


def _load_for_generate(model: str, dtype: str, device: torch.device) -> Any:
    """Return transformers' model, greedy."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load a causal LM from {model!r}: {error}") from error
    greedy: Any = GenerationConfig
    loaded.generation_config = greedy(do_sample=False, pad_token_id=loaded.config.pad_token_id or 0)
    return loaded.to(device).eval()


def run_in_turn(
    contenders: Mapping[str, Contender],
    batches: Sequence[Sequence[Prompt]],
    sampling: SamplingParams,
    progress: Progress,
    label: str,
) -> dict[str, list[Run]]:
    """Warm up, then decode each batch with every contender before the next batch; a different one starts each time."""
    if not contenders:
        return {}
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.run(batches[0], replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens)))
    for index, batch in enumerate(progress.track(batches, label)):
        for name in rotated(list(contenders), index):
            runs[name].append(contenders[name].run(batch, sampling))
    return runs


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in the order of a turn: each turn starts with the next name."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def now(device: torch.device) -> float:
    """Return seconds on a clock that first waits for the device to finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class TimedStep:
    """One engine step. stages: seconds of each stage; they add up to the step."""

    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    num_sequences: int = 0
    prefills: bool = False

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


class StageClock:
    """Time since the last mark counts for the stage whose end is marked next."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.steps: list[TimedStep] = []
        self._now = now
        self._last = 0.0

    def start(self) -> None:
        """Begin a step."""
        self.steps.append(TimedStep())
        self._last = self._now()

    def end(self, stage: str) -> None:
        """End a stage."""
        moment = self._now()
        self.steps[-1].stages[stage] += moment - self._last
        self._last = moment

    def scheduled(self, works: Sequence[ScheduledSequence]) -> None:
        """End the scheduling stage with its result."""
        self.steps[-1].num_sequences = len(works)
        self.steps[-1].prefills = any(work.tree is None for work in works)
        self.end("schedule")


@contextmanager
def timed_stages(engine: Engine, now: Callable[[], float]) -> Iterator[StageClock]:
    """Time the stages of every step inside the context; the wait for the device at each mark slows the steps a little."""
    clock = StageClock(now)
    scheduler, drafting, runner = engine.scheduler, engine.draft_manager, engine.runner
    with (
        _marked(engine, "step", before=clock.start, after=lambda _: clock.end("request")),
        _marked(drafting, "collect", before=lambda: clock.end("schedule"), after=lambda _: clock.end("drafts")),
        _marked(scheduler, "schedule", after=clock.scheduled),
        _marked(runner.backend, "forward", before=lambda: clock.end("inputs")),
        _marked(runner, "forward", after=lambda _: clock.end("forward")),
        _marked(scheduler, "commit", before=lambda: clock.end("sample")),
        _marked(drafting, "request", before=lambda: clock.end("commit")),
    ):
        yield clock


def summarise(steps: Sequence[TimedStep], waited: Sequence[str]) -> StageTimes:
    """Summarise the decode steps with the most sequences; at least one step must be without prefill.

    waited: stages that are not work of the host.
    """
    decoding = [step for step in steps if not step.prefills]
    most = max(step.num_sequences for step in decoding)
    full = [step for step in decoding if step.num_sequences == most]
    total = sum(step.seconds for step in full)
    return StageTimes(
        num_steps=len(full),
        num_sequences=most,
        step_ms=Spread.of([1e3 * step.seconds for step in full]),
        stages_ms={stage: 1e3 * median(step.stages[stage] for step in full) for stage in STAGES},
        host_share=sum(step.stages[stage] for step in full for stage in STAGES if stage not in waited) / total,
    )


def _nothing(*_: object) -> None:
    pass


@contextmanager
def _marked(
    part: object, method: str, before: Callable[[], object] = _nothing, after: Callable[[Any], object] = _nothing
) -> Iterator[None]:
    """Call, inside the context, `before` ahead of a method of this one object, and `after` with its result."""
    inner = getattr(part, method)

    def outer(*args: Any) -> Any:
        before()
        result = inner(*args)
        after(result)
        return result

    setattr(part, method, outer)
    try:
        yield
    finally:
        delattr(part, method)
