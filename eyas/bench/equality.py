"""Compares plain with speculative decoding, prompt by prompt, and explains the first token that differs.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eyas.api.request import GenerationStats
from eyas.bench.offline import engine_contenders, load
from eyas.bench.results import PLAIN, SPECULATIVE, first_difference
from eyas.bench.settings import OfflineSettings, Prompt, load_prompts
from eyas.config import EngineConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.kernels.noise import exponential_noise
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.progress import Progress
from eyas.protocol.tree import DraftTree

# Steps of the dtype at the size of the largest logit. Measured: rounding moved the gap of two logits by at most 0.8 steps.
MARGIN_STEPS = 2.0


@dataclass(frozen=True)
class Divergence:
    """The first token that differs. Gaps are between float32 logits, with the noise of the draw above temperature 0.

    Attributes:
        position: counted in generated tokens.
        top_gap: between the two highest.
        token_gap: from the highest down to the lower one of the two tokens'.
        margin: the largest gap over which rounding in the dtype can swap two tokens.
    """

    position: int
    plain: int
    speculative: int
    top_gap: float
    token_gap: float
    margin: float

    @property
    def explained(self) -> bool:
        return self.token_gap <= self.margin


@dataclass(frozen=True)
class EqualityComparison:
    """One prompt: tokens of its plain output, and the first difference of the speculative output."""

    num_tokens: int
    divergence: Divergence | None

    @property
    def holds(self) -> bool:
        """Return whether the outputs are equal, or rounding explains the difference."""
        return self.divergence is None or self.divergence.explained


@dataclass(frozen=True)
class EqualityReport:
    """All prompts, and the statistics of speculative decoding."""

    comparisons: tuple[EqualityComparison, ...]
    stats: GenerationStats

    @property
    def holds(self) -> bool:
        return all(comparison.holds for comparison in self.comparisons)

    def __str__(self) -> str:
        total = len(self.comparisons)
        equal = sum(comparison.divergence is None for comparison in self.comparisons)
        wrong = sum(not comparison.holds for comparison in self.comparisons)
        return (
            f"{equal} of {total} equal, {total - equal - wrong} explained by rounding, {wrong} not explained; "
            f"tau {self.stats.acceptance_length:.2f}"
        )


def compare(settings: OfflineSettings, modes: EngineConfig, progress: Progress) -> EqualityReport:
    """Decode every prompt plainly and speculatively, in batches of the settings' size, at its temperature.

    modes: of the engine, such as `deterministic`; the sizes come from the settings.

    Raises EyasError for models and prompts that cannot be used.
    """
    progress.show("loading models")
    settings, parts = load(replace(settings, draft_budget="fixed"))  # whole trees, whatever they cost
    prompts = load_prompts(settings, parts.target.vocab_size)
    batch, replay = settings.batches[0], ReplayDrafter(parts.target.vocab_size)
    num_tokens = batch * (max(map(len, prompts)) + settings.max_tokens + settings.tree.num_draft_tokens)
    config = replace(modes, max_kv_tokens=num_tokens, max_num_seqs=batch)
    engines = engine_contenders(settings, replace(parts, drafter=parts.drafter or replay), config)
    explainer, sampling = DivergenceExplainer(settings, modes.kv_cache_dtype), settings.sampling(settings.temperatures[0])
    batches = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
    comparisons: list[EqualityComparison] = []
    stats = GenerationStats()
    for group in progress.track(batches, "decoding plainly and speculatively"):
        plain = engines[PLAIN].run(group, sampling).outputs
        replay.set_outputs({f"{i}": (*prompt, *plain[i]) for i, prompt in enumerate(group)})
        speculative = engines[SPECULATIVE].run(group, sampling)
        stats.merge(speculative.stats)
        for seed, prompt in enumerate(group):
            divergence = explainer.divergence(prompt, seed, plain[seed], speculative.outputs[seed])
            comparisons.append(EqualityComparison(len(plain[seed]), divergence))
    return EqualityReport(tuple(comparisons), stats)


class DivergenceExplainer:
    """Explanation of a difference by the logits of a float32 copy of the target, loaded on first use.

    Args:
        kv_cache_dtype: of the copy's keys and values, too.
    """

    def __init__(self, settings: OfflineSettings, kv_cache_dtype: str = "auto") -> None:
        self._settings, self._kv_cache_dtype = settings, kv_cache_dtype

    def divergence(self, prompt: Prompt, seed: int, plain: Sequence[int], speculative: Sequence[int]) -> Divergence | None:
        """Return the first difference between two outputs of a prompt, drawn with `seed`; None if they are equal."""
        if plain == speculative:
            return None
        at = first_difference(plain, speculative)
        logits = self._logits((*prompt, *plain[:at]))
        scores = self._with_noise(logits, seed, len(prompt) + at)
        best, second = scores.topk(2).values.tolist()
        lower = min(float(scores[plain[at]]), float(scores[speculative[at]]))
        step = torch.finfo(getattr(torch, self._settings.dtype)).eps
        margin = MARGIN_STEPS * step * float(logits.abs().max())
        return Divergence(at, plain[at], speculative[at], best - second, best - lower, margin)

    @cached_property
    def _target(self) -> TargetModel:
        target = load_target(self._settings.model, "float32", self._settings.device)
        target.set_kv_cache_dtype(self._kv_cache_dtype)
        return target

    def _logits(self, tokens: Prompt) -> Tensor:
        """Return the logits after the last token, [V]."""
        target, rows = self._target, np.arange(len(tokens))
        segment = Segment(np.array(tokens, dtype=np.int64), rows, rows, rows[:0], None, rows[-1:])
        return target.forward(target.pack([segment]), target.new_kv_cache(len(tokens))).logits[0]

    def _with_noise(self, logits: Tensor, seed: int, position: int) -> Tensor:
        """Return the scores whose highest is drawn: argmin e / p is argmax (logit - temperature * log e)."""
        temperature = self._settings.temperatures[0]
        if temperature == 0:
            return logits
        noise = exponential_noise([seed], [position], torch.arange(len(logits), device=logits.device))[0]
        return logits - temperature * noise.log()


class ReplayDrafter(LocalDrafter):
    """Drafter of the known output of plain decoding, with a wrong guess beside each right one.

    Trees are as large as the budget allows, and are accepted as long as speculation repeats plain decoding.
    """

    needs = DrafterNeeds()

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._outputs: Mapping[str, Sequence[int]] = {}

    def set_outputs(self, outputs: Mapping[str, Sequence[int]]) -> None:
        """Draft from these from now on: prompt and output by session."""
        self._outputs = outputs

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._tree(context) for context in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        pass

    def _tree(self, context: DraftContext) -> DraftTree:
        """Return a chain of the known output. Each node has a wrong sibling before it: root - (a+1, a - (b+1, b - ...))."""
        budget, output = context.budget, self._outputs[context.session]
        levels = min(budget.max_depth, (budget.max_nodes - 1) // 2) if budget.wants_tree else 0
        tokens, parents, above = [context.tokens[-1]], [0], 0
        for token in output[context.committed_length : context.committed_length + levels]:
            tokens += [(token + 1) % self._vocab_size, token]
            parents += [above, above]
            above = len(tokens) - 1
        return DraftTree.of(tokens, parents, (0.0,) * len(tokens))
