"""The training loop of `eyas train run`: passes, checkpoints for exact resumption, the log, and evaluation now and then.

All randomness of a window is seeded by the run's seed and the number of windows before it, which also decides its data. So
the weights, the optimiser and the number of the step are the whole state of a run, on as many processes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import ConfigError
from eyas.models.checkpoint import explained
from eyas.progress import Show, progress, silent
from eyas.train.config import OptimizerConfig, TrainConfig
from eyas.train.evaluate import Evaluation, Evaluator
from eyas.train.features import NoStates, StateSource, keeping_saved
from eyas.train.trainee import Trainee
from eyas.train.windows import Windows

LOG_FILE, CHECKPOINTS = "log.jsonl", "checkpoints"
CHECKPOINT_KEYS = {"fingerprint", "data", "num_processes", "progress", "parameters", "optimizers", "schedulers"}
KEPT_CHECKPOINTS = 2
# Share of the time of training that evaluations take at most, unless eval.every says when they are.
EVALUATION_SHARE = 0.1


def newest_checkpoint(out: Path) -> Path | None:
    """Return the checkpoint from which a run in this folder continues."""
    return max((out / CHECKPOINTS).glob("step-*.pt"), default=None)


@dataclass
class Progressed:
    """Progress of a run.

    Attributes:
        num_tokens: of all windows with their padding.
        seconds: of all steps.
        best_tau, best_step: of the evaluation that kept `best`; 0 without one.
        evaluated_step: of the last evaluation, or of the last head that would have been evaluated.
        evaluation_s, last_evaluation_s: seconds of all evaluations, and of the last one.
        written: tokens that evaluations read, by temperature. A run that continues reads as many, or taus would differ.
    """

    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    best_tau: float = 0.0
    best_step: int = 0
    evaluated_step: int = 0
    evaluation_s: float = 0.0
    last_evaluation_s: float = 0.0
    written: dict[float, int] = field(default_factory=dict)


class Trainer:
    """Training run until config.optimizer.max_steps, which continues from the newest checkpoint of config.out if there is
    one.
    """

    def __init__(
        self, config: TrainConfig, trainee: Trainee, source: StateSource, windows: Windows, accelerator: Any,
        evaluator: Evaluator | None = None,
    ) -> None:  # fmt: skip
        self.config, self.source, self.windows = config, source, windows
        self.accelerator, self.evaluator = accelerator, evaluator
        self.trainee = trainee
        self.progress = Progressed()
        self._out = Path(config.out)
        optimizers = build_optimizers(trainee, config.optimizer)
        schedule = learning_rates(config.optimizer)
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in optimizers]
        self._model, *self._optimizers = accelerator.prepare(trainee, *optimizers)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: parameter for name, parameter in self.trainee.named_parameters() if parameter.requires_grad}

    @property
    def kept(self) -> dict[str, Tensor]:
        """The tensors of the head that a checkpoint keeps, by name: trained parameters, and the scales of its inputs."""
        return {**self.trained, **{name: own for name, own in self.trainee.named_buffers() if name == "input_scales"}}

    def run(self) -> Progressed:
        """Train to the end. Raises ConfigError if a loss is not finite, for a full disk, and for a changed configuration."""
        self.resume()
        max_steps, loss = self.config.optimizer.max_steps, math.nan
        with progress(self.accelerator.is_main_process) as shown:
            shown.show(f"step {self.progress.step} of {max_steps}")
            while self.progress.step < max_steps:
                began = time.monotonic()
                metrics = self.step()
                self.progress.seconds += time.monotonic() - began
                step = self.progress.step
                if step % self.config.log_every == 0 or step in (1, max_steps):
                    loss = self.log_step(metrics)["loss"]
                if self._evaluates_now():
                    self.evaluate(shown.show)
                if step % self.config.save_every == 0:
                    self.save()
                shown.show(self._figures(loss))
            if self.progress.evaluated_step < max_steps:
                self.evaluate(shown.show)
            self.save()
        return self.progress

    def _evaluates_now(self) -> bool:
        """Decide whether to evaluate after this step; the first process does for all.

        Without eval.every: at tenths of the run, if all evaluations then take at most EVALUATION_SHARE of the time. The cost
        of the first is not known before, so that it waits for half of the run.
        """
        own, c = self.progress, self.config
        if c.eval.every:
            return own.step % c.eval.every == 0
        if own.step % max(1, c.optimizer.max_steps // 10):
            return False
        is_known = own.last_evaluation_s > 0 or 2 * own.step >= c.optimizer.max_steps
        decision = [is_known and own.evaluation_s + own.last_evaluation_s <= EVALUATION_SHARE * own.seconds]
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(decision)
        return decision[0]

    def _figures(self, loss: float) -> str:
        """Step, loss, speed, best tau and the time that is left, in words."""
        own, max_steps = self.progress, self.config.optimizer.max_steps
        speed = own.num_tokens / max(1e-9, own.seconds)
        left = timedelta(seconds=round(own.seconds / own.step * (max_steps - own.step)))
        tau = f", tau {own.best_tau:.2f}" if own.best_tau else ""
        return f"step {own.step} of {max_steps}, loss {loss:.3f}, {speed:.0f} tokens/s{tau}, {left} left"

    def step(self, num_windows: int = 0) -> dict[str, Tensor]:
        """Take one optimiser step; return the figures of its passes, averaged over passes and processes.

        num_windows: of a single pass instead; 0 takes all passes of a step.
        """
        accumulated = 1 if num_windows else self.config.optimizer.gradient_accumulation_steps
        sums: dict[str, Tensor] = {}
        for part in range(accumulated):
            number = self.progress.step * accumulated + part
            with self.accelerator.accumulate(self._model):
                metrics = self._pass(number, num_windows, is_last=part == accumulated - 1)
            sums = {name: sums.get(name, 0) + value.detach() / accumulated for name, value in metrics.items()}
        self.progress.step += 1
        return {name: self.accelerator.reduce(value, "mean") for name, value in sums.items()}

    def _pass(self, number: int, num_windows: int, is_last: bool) -> Mapping[str, Tensor]:
        """Forward and backward of a batch; the optimiser steps if it is the last of its step."""
        c, rank = self.config, self.accelerator.process_index
        size = num_windows or c.optimizer.batch_size
        batch = self.windows.step_batch(c.seed, number, size, rank, self.accelerator.num_processes)
        batch = batch.to(self.accelerator.device)
        loss_type = c.loss.type_at(self.progress.step / c.optimizer.max_steps)
        states = (NoStates() if loss_type == "next_token" else self.source).states(batch)
        with self.accelerator.autocast():
            metrics: Mapping[str, Tensor] = self._model(batch, states, c.seed, loss_type)
        if not math.isfinite(float(metrics["loss"].detach())):
            raise ConfigError(
                f"the loss of step {self.progress.step + 1} is {float(metrics['loss'].detach())}; "
                "lower optimizer.learning_rate, or take optimizer.precision fp32; the last checkpoint is kept"
            )
        self.accelerator.backward(metrics["loss"])
        if is_last:
            self.accelerator.clip_grad_norm_(list(self.trained.values()), c.optimizer.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if is_last:
            for scheduler in self.schedulers:
                scheduler.step()
        self.progress.num_tokens += batch.tokens.numel() * self.accelerator.num_processes
        return metrics

    def evaluate(self, show: Show = silent) -> Evaluation | None:
        """Write the head to `last`, measure its trees, and copy it to `best` if they are the best so far.

        Without evaluations `best` is the last head.
        """
        found, own = None, self.progress
        own.evaluated_step = own.step
        if self.accelerator.is_main_process:
            self.write_head("last")
            if self.evaluator is None:
                self.write_head("best")
            else:
                began, budget = time.monotonic(), EVALUATION_SHARE * own.seconds - own.evaluation_s
                limit_s = math.inf if self.config.eval.every else budget / 2  # the rest is for drafting
                self.evaluator.written.update(own.written)
                found = self.evaluator.measure(self._out / "last", show, limit_s)
                own.written = dict(self.evaluator.written)
                own.last_evaluation_s = time.monotonic() - began
                own.evaluation_s += own.last_evaluation_s
                self._keep(found, self.evaluator.written_share)
        self.accelerator.wait_for_everyone()
        return found

    def _keep(self, found: Evaluation, written_share: float) -> None:
        self._write_log({"step": self.progress.step, **found.figures, "written_share": round(written_share, 4)})
        taus = {name: value for name, value in found.figures.items() if isinstance(value, float)}
        self.accelerator.log(taus, step=self.progress.step)
        if found.mean_tau > self.progress.best_tau:
            self.progress.best_tau, self.progress.best_step = found.mean_tau, self.progress.step
            self.write_head("best")

    def write_head(self, name: str) -> None:
        """Write the head to a folder of the run. The files of an older one stay until the new ones are whole."""
        folder, part = self._out / name, self._out / f"{name}.part"
        try:
            with keeping_saved(self._out):
                self._out.mkdir(parents=True, exist_ok=True)
                self.trainee.write(part)
                folder.mkdir(exist_ok=True)
                for file in part.iterdir():
                    file.replace(folder / file.name)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def log_step(self, metrics: Mapping[str, Tensor]) -> dict[str, Any]:
        figures = {name: float(value) for name, value in metrics.items()}
        rate = self.schedulers[0].get_last_lr()[0]
        speed = self.progress.num_tokens / max(1e-9, self.progress.seconds)
        record = {"step": self.progress.step, "num_tokens": self.progress.num_tokens, "learning_rate": rate, **figures}
        self._write_log(record | {"tokens_per_second": round(speed, 1), "seconds": round(self.progress.seconds, 1)})
        self.accelerator.log(figures | {"learning_rate": rate}, step=self.progress.step)
        return record | {"tokens_per_second": speed}

    def _write_log(self, record: Mapping[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self._out.mkdir(parents=True, exist_ok=True)
            with keeping_saved(self._out), (self._out / LOG_FILE).open("a") as log:
                log.write(json.dumps(record) + "\n")

    def save(self) -> None:
        """Write a checkpoint; older ones stay until it is whole."""
        if self.accelerator.is_main_process:
            folder = self._out / CHECKPOINTS
            folder.mkdir(parents=True, exist_ok=True)
            state = {
                "fingerprint": self.config.fingerprint,
                "data": self.windows.digest,
                "num_processes": self.accelerator.num_processes,
                "progress": asdict(self.progress),
                "parameters": {name: tensor.detach().cpu() for name, tensor in self.kept.items()},
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            }
            with keeping_saved(self._out):
                write_whole(folder / f"step-{self.progress.step:08d}.pt", partial(_save_state, state))
            for old in sorted(folder.glob("step-*.pt"))[:-KEPT_CHECKPOINTS]:
                old.unlink()
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Continue from the newest checkpoint, or begin if there is none; what the log says beyond it is cut off."""
        newest = newest_checkpoint(self._out)
        if newest is not None:
            self._restore(newest)
        log = self._out / LOG_FILE
        if log.exists() and self.accelerator.is_main_process:
            lines = [line for line in log.read_text().splitlines() if _step_of(line) <= self.progress.step]
            write_whole(log, lambda file: file.write_text("".join(f"{line}\n" for line in lines)))

    def _restore(self, newest: Path) -> None:
        with explained(f"cannot continue from {newest}; remove it, and the run continues from the one before"):
            state = torch.load(newest, map_location="cpu", weights_only=True)
            missing = CHECKPOINT_KEYS - state.keys()
        if missing:
            raise ConfigError(f"{newest} is no checkpoint of `eyas train run`: it lacks {min(missing)}; remove it")
        if state["fingerprint"] != self.config.fingerprint:
            raise ConfigError(
                f"{newest} is of a run with other settings, or of another version of Eyas; give the same settings to "
                "continue, or name another `out` and this run's `last` as draft_model"
            )
        if state["data"] != self.windows.digest:
            raise ConfigError(
                f"{newest} is of a run with other data than {self.config.data.path} holds now; give back what was prepared "
                "then, or name another `out` and this run's `last` as draft_model"
            )
        count, own = state["num_processes"], self.accelerator.num_processes
        if count != own:
            raise ConfigError(
                f"{newest} is of a run on {count} processes, but there are {own} now, with other batches; start as many "
                f"processes ({count}), or name another `out` and this run's `last` as draft_model"
            )
        with torch.no_grad():
            for name, tensor in self.kept.items():
                tensor.copy_(state["parameters"][name])
        for parts, key in ((self._optimizers, "optimizers"), (self.schedulers, "schedulers")):
            for part, saved in zip(parts, state[key], strict=True):
                part.load_state_dict(saved)
        for scheduler in self.schedulers:  # max_steps may be another one now, and with it the rate of the next step
            rates = [
                base * share(scheduler.last_epoch)
                for base, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates
        self.progress = Progressed(**state["progress"])


def build_optimizers(trainee: nn.Module, c: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Build AdamW for all parameters, or Muon (Jordan et al. 2024) for the matrices of decoder layers and AdamW for the
    rest.
    """
    named = [(name, parameter) for name, parameter in trainee.named_parameters() if parameter.requires_grad]
    chosen = [parameter for name, parameter in named if c.name == "muon" and ".layers." in name and parameter.ndim == 2]
    own = set(map(id, chosen))
    rest = [parameter for _, parameter in named if id(parameter) not in own]
    adamw = torch.optim.AdamW(rest, c.learning_rate, c.betas, weight_decay=c.weight_decay, fused=True)
    if not chosen:
        return [adamw]
    return [adamw, torch.optim.Muon(chosen, lr=c.muon_learning_rate, weight_decay=c.weight_decay)]


def learning_rates(c: OptimizerConfig) -> Callable[[int], float]:
    """Return the share of the peak rate at each step."""
    warmup, decay = max(1, round(c.warmup_ratio * c.max_steps)), max(1, round(c.decay_ratio * c.max_steps))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if c.lr_scheduler == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, c.max_steps - warmup))))
        return min(1.0, max(0.0, (c.max_steps - step) / decay)) if c.lr_scheduler == "wsd" else 1.0

    return share


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name first, so that it is whole or not there."""
    part = file.with_suffix(file.suffix + ".part")
    try:
        write(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _save_state(state: Mapping[str, Any], file: Path) -> None:
    """Call torch.save, whose RuntimeError for a full disk becomes an OSError."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _step_of(line: str) -> int:
    """Return the step of a line of the log; a line that a crash cut off counts as the last."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62
