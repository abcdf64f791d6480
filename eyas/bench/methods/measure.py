"""Decodes prompts with every method in turn: settings in, scores out. One prompt goes every way before the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich.progress import Progress

from eyas.bench.contenders import Contender, EngineContender, GenerateContender, now
from eyas.bench.methods.results import MethodScore, MethodsResults, TimedRun
from eyas.bench.methods.settings import MethodSpec, MethodsSettings, TaskPrompt, load_tasks
from eyas.bench.results import GENERATE, PLAIN
from eyas.config import EagleConfig, EngineConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.build import build_drafter, build_fuser
from eyas.drafters.methods import find_method
from eyas.engine.build import assemble_engine
from eyas.errors import ConfigError
from eyas.models.target import TargetModel, load_target

WARM_UP_TOKENS = 16
OWN_NOISE = EagleConfig(shared_noise=False)


class TimedDrafter(LocalDrafter):
    """A drafter whose time is counted."""

    def __init__(self, drafter: LocalDrafter, device: torch.device) -> None:
        self._drafter = drafter
        self._device = device
        self.seconds = 0.0

    @property
    def needs(self) -> DrafterNeeds:
        return self._drafter.needs

    @property
    def can_sample(self) -> bool:
        return self._drafter.can_sample

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        started = now(self._device)
        drafts = self._drafter.propose(contexts)
        self.seconds += now(self._device) - started
        return drafts

    def release(self, sessions: Sequence[str]) -> None:
        self._drafter.release(sessions)


@dataclass(frozen=True)
class Way:
    """A way to decode, and the drafter in it."""

    contender: Contender
    drafter: TimedDrafter | None = None


def measure(settings: MethodsSettings, progress: Progress) -> MethodsResults:
    """Everything that the settings ask for. Raises EyasError for models and prompts that cannot be used."""
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {settings.device}, but torch {torch.__version__} finds no CUDA device here")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    loading = progress.add_task("loading models", total=None)
    prompts = load_tasks(settings)
    room = max(len(prompt.token_ids) for prompt in prompts) + settings.max_tokens + settings.tree.nodes + 64
    target = load_target(settings.target, settings.dtype, settings.device)
    ways: dict[str, Way] = {PLAIN: Way(_engine(settings, target, None, room))}
    for spec in settings.methods:
        ways[spec.name] = _way(settings, target, spec, EagleConfig(), room)
    shared = [spec for spec in settings.methods if _shares_noise(settings, spec)]
    own = {spec.name: _way(settings, target, spec, OWN_NOISE, room) for spec in shared}
    generate = Way(GenerateContender(settings.target, settings.dtype, target.device))
    progress.update(loading, total=1, completed=1)
    scores: list[MethodScore] = []
    for temperature in settings.temperatures:
        named = ways | ({GENERATE: generate} if temperature == 0 else {})
        runs = _runs(settings, named, prompts, temperature, progress, f"temperature {temperature:g}")
        label = f"temperature {temperature:g}, without shared noise"
        quiet = _runs(settings, own, prompts, temperature, progress, label) if own and temperature > 0 else {}
        for name, its in runs.items():
            scores.append(MethodScore.of(name, temperature, its, runs[PLAIN], quiet.get(name, ())))
    return MethodsResults(torch.get_num_threads(), tuple(scores))


def _shares_noise(settings: MethodsSettings, spec: MethodSpec) -> bool:
    """Whether there is shared noise that the method could do without."""
    return find_method(spec.name).has_law and max(settings.temperatures) > 0


def _way(settings: MethodsSettings, target: TargetModel, spec: MethodSpec, eagle: EagleConfig, room: int) -> Way:
    made = build_drafter(spec.name, settings.target, spec.head, settings.dtype, settings.device, settings.tree, eagle)
    drafter = TimedDrafter(made, target.device)
    return Way(_engine(settings, target, drafter, room, spec), drafter)


def _engine(
    settings: MethodsSettings,
    target: TargetModel,
    drafter: TimedDrafter | None,
    room: int,
    spec: MethodSpec | None = None,
) -> EngineContender:
    """An engine of its own over the same weights, with the taps that its drafter's features want."""
    fuser = build_fuser(spec.name, spec.head, settings.target, settings.dtype, settings.device) if spec else None
    tapped = TargetModel(target.model, fuser.taps if fuser else ())
    config = EngineConfig(num_slots=room, max_running=1, prefix_cache=False)
    return EngineContender(assemble_engine(tapped, fuser, config, settings.tree, drafter), target.device)


def _runs(
    settings: MethodsSettings,
    ways: Mapping[str, Way],
    prompts: Sequence[TaskPrompt],
    temperature: float,
    progress: Progress,
    label: str,
) -> dict[str, list[TimedRun]]:
    sampling = settings.sampling(temperature)
    runs: dict[str, list[TimedRun]] = {name: [] for name in ways}
    for way in ways.values():
        way.contender.run([prompts[0].token_ids], replace(sampling, max_tokens=min(WARM_UP_TOKENS, settings.max_tokens)))
    for index, prompt in enumerate(progress.track(prompts, description=label)):
        names = list(ways)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            drafter = ways[name].drafter
            before = drafter.seconds if drafter else 0.0
            run = ways[name].contender.run([prompt.token_ids], sampling)
            runs[name].append(TimedRun(prompt.task, run, drafter.seconds - before if drafter else 0.0))
    return runs
