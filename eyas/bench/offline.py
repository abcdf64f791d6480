"""Measures decoding in one process: settings in, results out. Every batch is decoded in every way before the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.progress import Progress

from eyas.bench.report import Spread
from eyas.bench.results import (
    GENERATE,
    PLAIN,
    SPECULATIVE,
    FirstToken,
    OfflineResults,
    Run,
    SpeedComparison,
    StageTimes,
)
from eyas.bench.settings import OfflineSettings, Prompt, groups, load_prompts, random_prompt
from eyas.bench.timing import (
    Contender,
    EngineContender,
    GenerateContender,
    summarise,
    time_draft_rounds,
    time_verify_steps,
    watched,
)
from eyas.config import DraftingConfig, EngineConfig
from eyas.drafters.base import Drafter
from eyas.drafters.registry import NO_DRAFTS, build_drafter, build_fuser, default_method
from eyas.engine.build import assemble_engine
from eyas.errors import ConfigError
from eyas.models.heads.features import FeatureFuser
from eyas.models.target import TargetModel, load_target
from eyas.request import SamplingParams

WARM_UP_TOKENS = 16
LONG_PROMPT_TOKENS = 1000
NEW_PROMPT_TOKENS = 16

Ways = dict[str, Contender]


@dataclass(frozen=True)
class BenchParts:
    """What is loaded once. Without a draft head, fuser and drafter are None."""

    target: TargetModel
    fuser: FeatureFuser | None
    drafter: Drafter | None


def measure(settings: OfflineSettings, progress: Progress) -> OfflineResults:
    """Everything that the settings ask for. Raises EyasError for models and prompts that cannot be used."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    loading = progress.add_task("loading models", total=None)
    parts = load(settings)
    prompts = load_prompts(settings, parts.target.vocab_size)
    ways = contenders(settings, parts, prompts)
    progress.update(loading, total=1, completed=1)
    comparisons = tuple(
        compare(settings, ways, prompts, temperature, batch, progress)
        for temperature in settings.temperatures
        for batch in settings.batches
    )
    target, fuser, drafter = parts.target, parts.fuser, parts.drafter
    batches = progress.track(settings.batches, description="verify steps by rows")
    verify = [time for batch in batches for time in time_verify_steps(target, fuser, batch, settings.rows)]
    rounds = partial(time_draft_rounds, drafter, fuser.width, settings.tree, target) if drafter and fuser else None
    draft = [rounds(batch) for batch in progress.track(settings.batches, description="draft rounds")] if rounds else []
    first = first_token(settings, ways, warm_ways(settings, parts), target, progress)
    return OfflineResults(torch.get_num_threads(), comparisons, tuple(verify), tuple(draft), first)


def load(settings: OfflineSettings) -> BenchParts:
    """The target, and with a draft head its drafter. Raises CheckpointError; ConfigError for an unknown drafter or
    device."""
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {settings.device}, but torch {torch.__version__} finds no CUDA device here")
    target, draft, dtype, device = settings.target, settings.draft, settings.dtype, settings.device
    name = default_method(settings.drafter, draft)
    if name == NO_DRAFTS:
        return BenchParts(load_target(target, dtype, device), None, None)
    fuser = build_fuser(name, draft, target, dtype, device)
    drafter = build_drafter(name, target, draft, dtype, device, settings.tree, DraftingConfig())
    return BenchParts(load_target(target, dtype, device, fuser.aux_hidden_state_layers if fuser else ()), fuser, drafter)


def contenders(settings: OfflineSettings, parts: BenchParts, prompts: Sequence[Prompt]) -> Ways:
    """The ways to decode, on the same weights; the plain engine taps no features."""
    target = parts.target
    longest = max(map(len, prompts)) + settings.max_tokens
    room = max(settings.batches) * (longest + settings.tree.num_draft_tokens) + LONG_PROMPT_TOKENS
    config = EngineConfig(max_kv_tokens=room, max_num_seqs=max(settings.batches), prefix_cache=False)
    plain = assemble_engine(TargetModel(target.model), None, config, settings.tree, None)
    ways: Ways = {PLAIN: EngineContender(plain, target.device)}
    if parts.drafter is not None:
        config = replace(config, draft_budget=settings.budget)
        engine = assemble_engine(target, parts.fuser, config, settings.tree, parts.drafter)
        ways[SPECULATIVE] = EngineContender(engine, target.device)
    ways[GENERATE] = GenerateContender(settings.target, settings.dtype, target.device)
    return ways


def compare(
    settings: OfflineSettings, ways: Ways, prompts: Sequence[Prompt], temperature: float, batch: int, progress: Progress
) -> SpeedComparison:
    """All batches of one size in every way, each way first in its turn; then the stages of a step."""
    sampling = settings.sampling(temperature)
    ways = {way: contender for way, contender in ways.items() if way != GENERATE or temperature == 0}
    batches = groups(prompts, batch, settings.num_groups)
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    for contender in ways.values():
        contender.run(batches[0], replace(sampling, max_tokens=min(WARM_UP_TOKENS, settings.max_tokens)))
    label = f"temperature {temperature:g}, batch {batch}"
    for index, group in enumerate(progress.track(batches, description=label)):
        for way in _rotated(list(ways), index):
            runs[way].append(ways[way].run(group, sampling))
    return SpeedComparison.of(temperature, batch, runs, stages(ways, batches[0], sampling))


def stages(ways: Mapping[str, Contender], prompts: Sequence[Prompt], sampling: SamplingParams) -> dict[str, StageTimes]:
    """The stages of our engines' steps over one batch."""
    found = {}
    for way, contender in ways.items():
        if isinstance(contender, EngineContender):
            with watched(contender.engine, contender.now) as clock:
                contender.run(prompts, sampling)
            found[way] = summarise(clock.steps, waited=("forward", "drafts") if way == SPECULATIVE else ("forward",))
    return found


def warm_ways(settings: OfflineSettings, parts: BenchParts) -> Ways:
    """Engines that keep one long prompt, on the same weights."""
    target, fuser = parts.target, parts.fuser
    config = EngineConfig(
        max_kv_tokens=LONG_PROMPT_TOKENS + NEW_PROMPT_TOKENS + settings.tree.num_draft_tokens, max_num_seqs=1
    )
    plain = assemble_engine(TargetModel(target.model), None, config, settings.tree, None)
    ways: Ways = {PLAIN: EngineContender(plain, target.device)}
    if parts.drafter is not None:
        engine = assemble_engine(target, fuser, config, settings.tree, parts.drafter)
        ways[SPECULATIVE] = EngineContender(engine, target.device)
    return ways


def first_token(settings: OfflineSettings, ways: Ways, warm: Ways, target: TargetModel, progress: Progress) -> FirstToken:
    """One long prompt at a time, never the same twice; the first round warms up. Then, in `warm` ones, what begins with it
    and goes on with a few tokens that are new."""
    length = min(LONG_PROMPT_TOKENS, target.max_model_len - NEW_PROMPT_TOKENS - 1)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    cold_ms: dict[str, list[float]] = {way: [] for way in ways}
    warm_ms: dict[str, list[float]] = {way: [] for way in warm}
    for index in progress.track(range(settings.num_groups + 1), description="time to first token"):
        prompt = random_prompt(target.vocab_size, length, seed=index)
        for way in _rotated(list(ways), index):
            cold_ms[way].append(1e3 * ways[way].run([prompt], sampling).seconds)
        longer = (*prompt, *random_prompt(target.vocab_size, NEW_PROMPT_TOKENS, seed=settings.num_groups + 1 + index))
        for way in _rotated(list(warm), index):
            warm[way].run([prompt], sampling)
            warm_ms[way].append(1e3 * warm[way].run([longer], sampling).seconds)
    cold, warmed = ({way: Spread.of(its[1:]) for way, its in ms.items()} for ms in (cold_ms, warm_ms))
    return FirstToken(length, cold, NEW_PROMPT_TOKENS, warmed)


def _rotated(ways: list[str], turn: int) -> list[str]:
    at = turn % len(ways)
    return ways[at:] + ways[:at]
