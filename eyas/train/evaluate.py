"""Evaluation of a head: the draft trees that serving would grow, along what the target writes for held-out prompts."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.device.placement import threads_for
from eyas.drafters.base import Drafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.models.placement import resolve_placement
from eyas.models.target import TargetModel
from eyas.progress import Show, silent
from eyas.protocol.commit import NO_TREE, Commit, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.train.config import EvalConfig
from eyas.train.data import HELDOUT, TRAIN, StoredDocuments, read_prepared

Prompt = tuple[int, ...]
# Tokens that the target writes for a prompt at least: the root of the first tree and one that it may hold.
MIN_OUTPUT = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Figures by temperature: tau, tokens per verify step with the bonus token, and the share of trees accepted to each
    depth.
    """

    tau: dict[float, float]
    acceptance_by_depth: dict[float, tuple[float, ...]]

    @property
    def mean_tau(self) -> float:
        """Return what the best checkpoint is kept by."""
        return fmean(self.tau.values())

    @property
    def figures(self) -> dict[str, Any]:
        """Return the figures for the log."""
        tau = {f"tau_t{temperature:g}": round(value, 4) for temperature, value in self.tau.items()}
        depths = {f"acceptance_t{t:g}": [round(share, 4) for share in own] for t, own in self.acceptance_by_depth.items()}
        return tau | depths


@dataclass(frozen=True)
class KnownOutput:
    """Output of the target for a prompt.

    Attributes:
        tokens: prompt and output.
        states [T, m * C]: those that heads read.
    """

    request: Request
    tokens: tuple[int, ...]
    states: Tensor


class Evaluator:
    """Evaluator of a method's heads on the same prompts.

    Speculation changes no token, so that the target decodes each prompt once, at the first measurement, and is let go. Every
    head then drafts along these outputs: a tree is accepted as far as it holds the next tokens.

    Args:
        method: the drafting method that serves the head.
        target: on this device; None loads one at the first use.
        threads: of torch while it measures; 0 takes what serving takes, as compiled kernels want one.
    """

    def __init__(
        self, model: str, method: str, prompts: Sequence[Prompt], config: EvalConfig, device: str = "auto",
        target: TargetModel | None = None, threads: int = 0,
    ) -> None:  # fmt: skip
        self.given, self._threads = target, threads
        self._model, self._method, self._prompts, self._config = model, method, prompts, config
        self._device, self._dtype = resolve_placement(device, "auto", model)
        # By temperature: tokens that the target writes for all prompts, as many as it did at the first measurement.
        self.written: dict[float, int] = {}
        # By temperature; of heads that read these layers.
        self._outputs: dict[tuple[int, ...], dict[float, list[KnownOutput]]] = {}

    @property
    def written_share(self) -> float:
        """The share of eval.max_tokens that the target has written, at the temperature with the least; 1 before."""
        total = len(self._prompts) * self._config.max_tokens
        return min(self.written.values(), default=total) / total

    def measure(self, head: Path, show: Show = silent, limit_s: float = math.inf) -> Evaluation:
        """Draft along the outputs of all prompts at all temperatures. Raises CheckpointError for a broken head.

        limit_s: seconds that the target may decode, the first time; then the outputs are as long as that allows. They
        have the lengths of `written`, if it holds some.
        """
        with threads_for(self._threads, (self._device, self._dtype)):
            found = self._measure(DraftHead(str(head), self._method), show, limit_s)
        gc.collect()  # engines and drafters are cycles of references, and would keep their weights for a while
        return found

    def _measure(self, opened: DraftHead, show: Show, limit_s: float) -> Evaluation:
        c = self._config
        tree = opened.resolve_tree(TreeConfig(c.num_draft_tokens, c.num_steps, c.top_k))
        rng = torch.random.get_rng_state()
        fuser = opened.build_fuser(self._model, self._dtype, self._device)
        layers = fuser.aux_hidden_state_layers if fuser else ()
        if layers not in self._outputs:
            self._outputs[layers] = self._decode(layers, show, limit_s)
        tau, depths = {}, {}
        drafting = DraftingConfig(cuda_graphs=False)
        drafter = opened.build_drafter(self._model, self._dtype, self._device, tree, drafting)
        for temperature, outputs in self._outputs[layers].items():
            show(f"evaluating: drafting for {len(outputs)} prompts at temperature {temperature:g}")
            stats = _draft_along(drafter, fuser, outputs, TreeBudget(c.num_draft_tokens, tree.num_steps))
            tau[temperature], depths[temperature] = stats.acceptance_length, tuple(stats.acceptance_by_depth)
        torch.random.set_rng_state(rng)
        return Evaluation(tau, depths)

    def _decode(self, layers: tuple[int, ...], show: Show, limit_s: float) -> dict[float, list[KnownOutput]]:
        """Return the target's outputs for all prompts, by temperature. limit_s: see `measure`."""
        c = self._config
        if not self.given:
            show(f"evaluating: loading {self._model}")
        target = self.given or load_target(self._model, self._dtype, self._device)
        began = time.monotonic()
        num_slots = (max(map(len, self._prompts)) + c.max_tokens + 2) * len(self._prompts)
        engine_config = EngineConfig(max_kv_tokens=num_slots, prefix_cache=False)
        found: dict[float, list[KnownOutput]] = {}
        for number, temperature in enumerate(c.temperatures):
            due = began + limit_s * (number + 1) / len(c.temperatures)
            engine = assemble_engine(target.with_features(), None, engine_config, TreeConfig(), None)
            tokens = [list(prompt) for prompt in self._prompts]
            sampling = [SamplingParams(c.max_tokens, temperature, ignore_eos=True, seed=n) for n in range(len(tokens))]
            requests = [Request(f"{n}", prompt, sampling[n]) for n, prompt in enumerate(self._prompts)]
            for request in requests:
                engine.submit(request)
            total, num_tokens, least = len(tokens) * c.max_tokens, 0, 0
            known = self.written.get(temperature)
            while engine.has_work and (
                num_tokens < known if known is not None else least < MIN_OUTPUT or time.monotonic() < due
            ):
                for chunk in engine.step():
                    tokens[int(chunk.request_id)] += chunk.token_ids
                    num_tokens += len(chunk.token_ids)
                least = min(len(own) - len(prompt) for own, prompt in zip(tokens, self._prompts, strict=True))
                show(f"evaluating: the target has written {num_tokens} of {total} tokens at temperature {temperature:g}")
            self.written[temperature] = num_tokens
            if num_tokens < total:
                log.warning(
                    "this evaluation takes %d of %d tokens at temperature %g, to stay within a tenth of the run; eval.every "
                    "or fewer eval.max_tokens let it take all", num_tokens, total, temperature,
                )  # fmt: skip
            reader = target.with_features(layers)
            found[temperature] = [
                KnownOutput(request, tuple(own), _states(reader, own[:-1]))
                for request, own in zip(requests, tokens, strict=True)
            ]
            reader.set_aux_hidden_state_layers(())
        return found


def _states(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    """Return the collected hidden states of a text, [T, m * C]; of width 0 if none are collected."""
    ids, rows, none = np.array(tokens, dtype=np.int64), np.arange(len(tokens)), np.zeros(0, dtype=np.int64)
    packed = target.pack([Segment(ids, rows, rows, none, None, rows[-1:])])
    states = target.forward(packed, target.new_kv_cache(len(ids))).aux_hidden_states
    return torch.empty(len(ids), 0) if states is None else states


@torch.inference_mode()
def _draft_along(
    drafter: Drafter, fuser: FeatureFuser | None, outputs: Sequence[KnownOutput], budget: TreeBudget
) -> GenerationStats:
    """Verify steps whose trees are accepted as far as they hold the outputs' next tokens."""
    stats = GenerationStats()
    features = [None if fuser is None else fuser(output.states) for output in outputs]
    # By output: tokens that the drafter has, and committed tokens. The last committed one is the root.
    drafted, lengths = [0] * len(outputs), [len(output.request.prompt_ids) + 1 for output in outputs]
    while active := [n for n, output in enumerate(outputs) if lengths[n] < len(output.tokens)]:
        contexts = []
        for n in active:
            own, start = features[n], drafted[n]
            new = None if own is None else own[max(start - 1, 0) : lengths[n] - 1]
            request, tokens = outputs[n].request, outputs[n].tokens[start : lengths[n]]
            depth = min(budget.max_depth, len(outputs[n].tokens) - lengths[n] - 1)  # the last token is no drafted one
            own_budget = budget._replace(max_depth=depth) if depth else NO_TREE
            contexts.append(Commit(request.id, 0, start, tokens, new, request.noise_key, own_budget))
            drafted[n] = lengths[n]
        for n, draft in zip(active, drafter.request(contexts)(), strict=True):
            if isinstance(draft, ResyncRequired):
                drafted[n] = max(draft.committed_length, 0)
            following = outputs[n].tokens[lengths[n] :]
            accepted = _num_accepted(draft, following) if isinstance(draft, DraftTree) else 0
            emitted = min(accepted + 1, len(following))
            num_drafted, depth = (draft.num_drafted, draft.depth) if isinstance(draft, DraftTree) else (0, 0)
            stats.merge(GenerationStats(1, num_drafted, accepted, emitted, [1] * depth, [1] * accepted))
            lengths[n] += emitted
    drafter.release([output.request.id for output in outputs])
    return stats


def _num_accepted(tree: DraftTree, following: Sequence[int]) -> int:
    """Return how many of the next tokens the tree holds one below the other."""
    node = 0
    for number, token in enumerate(following):
        child = tree.child(node, token)
        if child is None:
            return number
        node = child
    return len(following)


def heldout_prompts(folder: Path, config: EvalConfig) -> list[Prompt]:
    """Return the beginnings of held-out documents: up to the first supervised token, or prompt_tokens where all of it is.

    Without a held-out split, those of training documents, with a warning.
    """
    split = HELDOUT if read_prepared(folder).num_heldout else TRAIN
    if split == TRAIN:
        log.warning("%s holds no document out: evaluations take training documents, and flatter the head", folder)
    documents, prompts = StoredDocuments(folder, split), []
    for number in range(0, len(documents), max(1, len(documents) // config.num_prompts))[: config.num_prompts]:
        ids, mask = documents[number]
        first = int(mask.argmax()) if mask.any() else 0
        cut = first if first > 1 else min(config.prompt_tokens, len(ids))
        prompts.append(tuple(int(token) for token in ids[:cut]))
    return prompts
