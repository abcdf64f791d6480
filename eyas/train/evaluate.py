"""Evaluation of a head through the serving path: draft trees of the engine on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.registry import build_drafter, build_fuser, resolve_tree
from eyas.engine.build import assemble_engine
from eyas.models.checkpoint import resolve_placement
from eyas.models.target import TargetModel, load_target
from eyas.request import GenerationStats, Request, SamplingParams
from eyas.train.config import EvalConfig
from eyas.train.data import HELDOUT, TRAIN, StoredDocuments, read_prepared

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """By temperature: tau, tokens per verify step with the bonus token, and the share of trees accepted to each depth."""

    tau: dict[float, float]
    acceptance_by_depth: dict[float, tuple[float, ...]]

    @property
    def mean_tau(self) -> float:
        """What the best checkpoint is kept by."""
        return fmean(self.tau.values())

    @property
    def figures(self) -> dict[str, Any]:
        """For the log."""
        tau = {f"tau_t{temperature:g}": round(value, 4) for temperature, value in self.tau.items()}
        depths = {f"acceptance_t{t:g}": [round(share, 4) for share in own] for t, own in self.acceptance_by_depth.items()}
        return tau | depths


class Evaluator:
    """Measures heads of a method on the same prompts. The target is loaded once."""

    def __init__(
        self, model: str, method: str, prompts: Sequence[Prompt], config: EvalConfig, device: str = "auto",
        target: TargetModel | None = None,
    ) -> None:  # fmt: skip
        """method: the drafting method that serves the head. target: on this device; None loads one at the first use."""
        self._given = target
        self._model, self._method, self._prompts, self._config = model, method, prompts, config
        self._device, self._dtype = resolve_placement(device, "auto", model)

    @cached_property
    def _target(self) -> TargetModel:
        return self._given or load_target(self._model, self._dtype, self._device)

    def measure(self, head: Path) -> Evaluation:
        """Decode all prompts at all temperatures with trees of the head. Raises CheckpointError for a broken head."""
        c = self._config
        tree = resolve_tree(TreeConfig(c.num_draft_tokens, c.num_steps, c.top_k), self._method, str(head))
        tau, depths = {}, {}
        rng = torch.random.get_rng_state()
        for temperature in c.temperatures:
            fuser = build_fuser(self._method, str(head), self._model, self._dtype, self._device)
            drafter = build_drafter(
                self._method, self._model, str(head), self._dtype, self._device, tree, DraftingConfig(cuda_graphs=False)
            )
            target = self._target.with_features(fuser.aux_hidden_state_layers if fuser else ())
            longest = max(map(len, self._prompts)) + c.max_tokens + 2 * c.num_draft_tokens
            num_slots = longest * len(self._prompts)
            engine_config = EngineConfig(max_kv_tokens=num_slots, prefix_cache=False, draft_budget="fixed")
            engine = assemble_engine(target, fuser, engine_config, tree, drafter)
            stats = GenerationStats()
            for index, prompt in enumerate(self._prompts):
                sampling = SamplingParams(c.max_tokens, temperature, ignore_eos=True, seed=index)
                engine.submit(Request(f"{index}", prompt, sampling))
            while engine.has_work:
                for chunk in engine.step():
                    stats.add(chunk)
            target.set_aux_hidden_state_layers(())
            tau[temperature], depths[temperature] = stats.acceptance_length, tuple(stats.acceptance_by_depth)
        torch.random.set_rng_state(rng)
        return Evaluation(tau, depths)


def heldout_prompts(folder: Path, config: EvalConfig) -> list[Prompt]:
    """Beginnings of held-out documents: up to the first supervised token, or prompt_tokens where all of it is.

    Without a held-out split, those of training documents.
    """
    split = HELDOUT if read_prepared(folder).num_heldout else TRAIN
    documents, prompts = StoredDocuments(folder, split), []
    for number in range(0, len(documents), max(1, len(documents) // config.num_prompts))[: config.num_prompts]:
        ids, mask = documents[number]
        first = int(mask.argmax()) if mask.any() else 0
        cut = first if first > 1 else min(config.prompt_tokens, len(ids))
        prompts.append(tuple(int(token) for token in ids[:cut]))
    return prompts
