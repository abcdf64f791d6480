"""The ways to decode that are compared: prompts in, tokens and seconds out. Knows no statistics and no files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.bench.results import Run
from eyas.bench.workloads import Prompt
from eyas.engine.engine import Engine
from eyas.errors import CheckpointError
from eyas.models.checkpoint import resolve
from eyas.request import GenerationStats, Request, SamplingParams


class Contender(Protocol):
    """A way to decode a batch."""

    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Run:
        """Decode all prompts at once; prompt i draws with seed i."""
        ...


class EngineContender:
    """An engine of ours, with a drafter or without."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.now = partial(now, device)

    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Run:
        started = self.now()
        for index, prompt in enumerate(prompts):
            self.engine.submit(Request(f"{index}", prompt, replace(sampling, seed=index)))
        outputs: list[tuple[int, ...]] = [()] * len(prompts)
        stats = GenerationStats()
        while self.engine.has_work:
            for chunk in self.engine.step():
                outputs[int(chunk.request_id)] += chunk.token_ids
                stats.add(chunk)
        return Run(self.now() - started, tuple(outputs), stats)


class GenerateContender:
    """transformers' own `generate` over a left-padded batch, greedy, with its default attention and cache."""

    def __init__(self, target: str, dtype: str, device: torch.device) -> None:
        """Raises CheckpointError when transformers cannot load the model."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(resolve(target), dtype=getattr(torch, dtype))
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise CheckpointError(f"transformers cannot load a causal LM from {target!r}: {error}") from error
        self._model = model.to(device).eval()
        greedy: Any = GenerationConfig
        self._model.generation_config = greedy(do_sample=False, pad_token_id=model.config.pad_token_id or 0)
        self._device = device

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Run:
        assert sampling.temperature == 0, "generate draws other noise than the engine"
        started = now(self._device)
        longest = max(map(len, prompts))
        ids = self._tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = self._tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=sampling.max_tokens)
        outputs = tuple(map(tuple, out[:, longest:].tolist()))
        return Run(now(self._device) - started, outputs, GenerationStats())

    def _tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self._device)


def now(device: torch.device) -> float:
    """Seconds on a clock that waits for the device to finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
