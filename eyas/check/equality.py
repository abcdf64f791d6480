"""A drafter for checks: it is told what plain decoding said, and drafts that, with a wrong guess beside each right one.

Plain against speculative decoding: settings in, one comparison per prompt out, each first difference with its reason.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from eyas.bench.offline import BenchParts, load
from eyas.bench.results import Run
from eyas.bench.settings import OfflineSettings, Prompt, load_prompts
from eyas.bench.timing import EngineContender
from eyas.cache.kv_cache import KVCache
from eyas.config import EngineConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.engine.build import assemble_engine
from eyas.models.inputs import Segment, pack
from eyas.models.target import TargetModel, load_target
from eyas.request import GenerationStats
from eyas.sampling.noise import exponential_noise
from eyas.tree import DraftTree


class ReplayDrafter(LocalDrafter):
    """Trees that are as large as the budget allows and are accepted for as long as speculation repeats plain decoding."""

    needs = DrafterNeeds()

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._scripts: Mapping[str, Sequence[int]] = {}

    def follow(self, scripts: Mapping[str, Sequence[int]]) -> None:
        """From now on, draft from these: prompt and output by session."""
        self._scripts = scripts

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._tree(context) for context in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        pass

    def _tree(self, context: DraftContext) -> DraftTree:
        """A chain of the script, each node with a sibling that comes before it."""
        budget, script = context.budget, self._scripts[context.session]
        levels = min(budget.max_depth, (budget.max_nodes - 1) // 2) if budget.wants_tree else 0
        tokens, parents = [context.tokens[-1]], [0]
        above = 0
        for token in script[context.committed_length : context.committed_length + levels]:
            tokens += [(token + 1) % self._vocab_size, token]
            parents += [above, above]
            above = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


# Steps of the dtype at the size of the largest logit. Measured: rounding moved the gap of two logits by at most 0.8 steps.
MARGIN_STEPS = 2.0


@dataclass(frozen=True)
class Divergence:
    """The first token that differs. Scores are logits, perturbed by the draw's noise above temperature 0, in float32.

    position: counted in emitted tokens. gap: between the two highest scores. apart: from the highest score down to the
    lower one of the two tokens'. margin: how far apart rounding in the dtype may bring tokens that trade places.
    """

    position: int
    plain: int
    speculative: int
    gap: float
    apart: float
    margin: float

    @property
    def explained(self) -> bool:
        return self.apart <= self.margin


@dataclass(frozen=True)
class EqualityComparison:
    """One prompt: tokens of its plain output, and where the speculative one parts from it."""

    num_tokens: int
    divergence: Divergence | None

    @property
    def holds(self) -> bool:
        """Whether the outputs are equal, or differ for an explained reason."""
        return self.divergence is None or self.divergence.explained


@dataclass(frozen=True)
class Equality:
    """All prompts, and the speculation that went into them."""

    comparisons: tuple[EqualityComparison, ...]
    stats: GenerationStats

    @property
    def holds(self) -> bool:
        return all(comparison.holds for comparison in self.comparisons)


def compare(settings: OfflineSettings, deterministic: bool, progress: Progress) -> Equality:
    """Decode every prompt in both ways, in batches of the settings' size, at its temperature.

    Raises EyasError for models and prompts that cannot be used.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    loading = progress.add_task("loading models", total=None)
    parts = load(settings)
    prompts = load_prompts(settings, parts.target.vocab_size)
    ways = _Ways(settings, parts, _engine_config(settings, prompts, deterministic))
    progress.update(loading, total=1, completed=1)
    batch, judge = settings.batches[0], Judge(settings)
    batches = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
    comparisons: list[EqualityComparison] = []
    stats = GenerationStats()
    for group in progress.track(batches, description="decoding in both ways"):
        plain, speculative = ways.plain(group), ways.speculative(group)
        stats.merge(speculative.stats)
        for seed, prompt in enumerate(group):
            found = judge.divergence(prompt, seed, plain.outputs[seed], speculative.outputs[seed])
            comparisons.append(EqualityComparison(len(plain.outputs[seed]), found))
    return Equality(tuple(comparisons), stats)


class Judge:
    """Looks at what a float32 copy of the target says where two outputs part. Loads it when first needed."""

    def __init__(self, settings: OfflineSettings) -> None:
        self._settings = settings

    def divergence(self, prompt: Prompt, seed: int, plain: Sequence[int], speculative: Sequence[int]) -> Divergence | None:
        """Where the outputs of a prompt, drawn with `seed`, differ first; None where they do not."""
        pairs = enumerate(zip(plain, speculative, strict=True))
        at = next((index for index, (one, other) in pairs if one != other), None)
        if at is None:
            return None
        logits = self._logits((*prompt, *plain[:at]))
        scores = self._perturbed(logits, seed, len(prompt) + at)
        best, second = scores.topk(2).values.tolist()
        lower = min(float(scores[plain[at]]), float(scores[speculative[at]]))
        step = torch.finfo(getattr(torch, self._settings.dtype)).eps
        margin = MARGIN_STEPS * step * float(logits.abs().max())
        return Divergence(at, plain[at], speculative[at], best - second, best - lower, margin)

    @cached_property
    def _target(self) -> TargetModel:
        return load_target(self._settings.target, "float32", self._settings.device)

    def _logits(self, tokens: Prompt) -> Tensor:
        """After the last token, [V]."""
        target, rows = self._target, np.arange(len(tokens))
        pools = KVCache(len(rows), target.kv_shapes, 0, target.dtype, target.device)
        segment = Segment(np.array(tokens, dtype=np.int64), rows, rows, rows[:0], None, rows[-1:])
        return target.forward(pack([segment], target.device), pools).logits[0]

    def _perturbed(self, logits: Tensor, seed: int, position: int) -> Tensor:
        """What the draw takes the highest of: argmin e / p is argmax (logit - temperature * log e)."""
        temperature = self._settings.temperatures[0]
        if temperature == 0:
            return logits
        noise = exponential_noise([seed], [position], torch.arange(len(logits), device=logits.device))[0]
        return logits - temperature * noise.log()


class _Ways:
    """Two engines over one loaded target."""

    def __init__(self, settings: OfflineSettings, parts: BenchParts, config: EngineConfig) -> None:
        target, tree = parts.target, settings.tree
        self._sampling = settings.sampling(settings.temperatures[0])
        self._replay = ReplayDrafter(target.vocab_size)
        plain = assemble_engine(TargetModel(target.model), None, config, tree, None)
        speculative = assemble_engine(target, parts.fuser, config, tree, parts.drafter or self._replay)
        self._plain = EngineContender(plain, target.device)
        self._speculative = EngineContender(speculative, target.device)

    def plain(self, prompts: Sequence[Prompt]) -> Run:
        run = self._plain.run(prompts, self._sampling)
        self._replay.follow({f"{i}": (*prompts[i], *run.outputs[i]) for i in range(len(prompts))})
        return run

    def speculative(self, prompts: Sequence[Prompt]) -> Run:
        return self._speculative.run(prompts, self._sampling)


def _engine_config(settings: OfflineSettings, prompts: Sequence[Prompt], deterministic: bool) -> EngineConfig:
    batch, longest = settings.batches[0], max(map(len, prompts))
    room = batch * (longest + settings.max_tokens + settings.tree.num_draft_tokens)
    return EngineConfig(max_kv_tokens=room, max_num_seqs=batch, deterministic=deterministic)
