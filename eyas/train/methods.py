"""Methods that can be trained: builds the head of each method, and puts a whole run together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.device.placement import check_device, use_threads
from eyas.device.processor import trains_in_bfloat16
from eyas.errors import MissingPackage
from eyas.models.layers.attention import import_transformers
from eyas.models.placement import resolve_placement
from eyas.progress import Show, silent
from eyas.train.block import BlockTrainer, new_block_trainer
from eyas.train.config import MASK_METHODS, SERVED_BY, WHOLE_VOCABULARY, TrainConfig
from eyas.train.draft_vocabulary import draft_vocabulary
from eyas.train.eagle import new_eagle_trainer
from eyas.train.evaluate import Evaluator, heldout_prompts
from eyas.train.features import NoStates, OnlineTarget, StateSource, StoredFeatures, TargetWeights, load_target_weights
from eyas.train.multi_head import new_draft_model_trainer, new_hydra_trainer, new_medusa_trainer
from eyas.train.peagle import PEagleTrainer, new_peagle_trainer
from eyas.train.start import Samples
from eyas.train.trainee import Startable, Trainee
from eyas.train.trainer import Trainer, newest_checkpoint
from eyas.train.windows import Windows, check_mask_token, check_prepared

Build = Callable[[TrainConfig, TargetWeights, Tensor], Trainee]

TRAINEES: Mapping[str, Build] = {
    "dspark": new_block_trainer,
    "dflash": new_block_trainer,
    "peagle": new_peagle_trainer,
    "eagle1": new_eagle_trainer,
    "eagle3": new_eagle_trainer,
    "eagle3.1": new_eagle_trainer,
    "medusa": new_medusa_trainer,
    "hydra": new_hydra_trainer,
    "draft_model": new_draft_model_trainer,
}


def build_trainee(config: TrainConfig, target: TargetWeights, windows: Windows) -> Trainee:
    """Return the head with its loss, checked against the data. Raises ConfigError or CheckpointError."""
    check_prepared(windows, config.model, target.vocab_size)
    torch.manual_seed(config.seed)
    if config.method in MASK_METHODS and config.head.mask_token_id < 0 and not config.draft_model:
        config = replace(config, head=replace(config.head, mask_token_id=windows.info.mask_token_id))
    size = config.loss.vocab_size if config.method in WHOLE_VOCABULARY else config.head.draft_vocab_size
    draft_ids = draft_vocabulary(Path(config.data.path), size, target.vocab_size)
    trainee = TRAINEES[config.method](config, target, draft_ids)
    reserved = trainee.head.config.mask_token_id if isinstance(trainee, BlockTrainer | PEagleTrainer) else None
    if reserved is not None:  # of a warm start, the head's own
        check_mask_token(windows, reserved)
    return trainee


def build_source(config: TrainConfig, windows: Windows, layers: tuple[int, ...]) -> StateSource:
    """Build the source: stored features, the target in this process, or nothing. Raises ConfigError or CheckpointError."""
    if not config.loss.needs_target:
        return NoStates()
    if config.data.features:
        return StoredFeatures.open(Path(config.data.features), windows, layers, _dtype(config))
    return build_online_target(config, layers)


def build_online_target(config: TrainConfig, layers: tuple[int, ...]) -> OnlineTarget:
    """Return the target in the precision of the run.

    A process group must be there if it is sharded. Raises as OnlineTarget.
    """
    device, _ = resolve_placement(config.target_device or config.device, "auto", config.model)
    check_device("float32", device)
    return OnlineTarget(config.model, layers, torch.device(device), _dtype(config), config.shard_target)


def _dtype(config: TrainConfig) -> torch.dtype:
    """Return the dtype of passes. A CPU without units for bfloat16 takes minutes in it for a step of seconds."""
    if config.optimizer.precision == "auto":
        device, _ = resolve_placement(config.device, "auto", config.model)
        return torch.bfloat16 if torch.device(device).type != "cpu" or trains_in_bfloat16() else torch.float32
    return torch.bfloat16 if config.optimizer.precision == "bf16" else torch.float32


def build_trainer(config: TrainConfig, show: Show = silent) -> Trainer:
    """Build all parts of a run. Raises ConfigError or CheckpointError, before anything is trained."""
    accelerator = _accelerator(config)
    show(f"reading {config.data.path}")
    windows = Windows(Path(config.data.path), config.data.max_length)
    show(f"reading embedding and output layer of {config.model}")
    target = load_target_weights(config.model)
    show(f"making the {config.method} head")
    trainee = build_trainee(config, target, windows)
    show(f"loading {config.model}")
    source = build_source(config, windows, trainee.aux_hidden_state_layers)
    if isinstance(source, OnlineTarget):
        source.share_weights(trainee)
    if isinstance(trainee, Startable) and solves_start(config):
        show(f"solving the start of the {config.method} head")
        trainee.start(Samples.read(source, windows, torch.device("cpu")))
    evaluates = config.eval.num_prompts and accelerator.is_main_process
    evaluator = build_evaluator(config, source, str(accelerator.device)) if evaluates else None
    return Trainer(config, trainee, source, windows, accelerator, evaluator)


def solves_start(config: TrainConfig) -> bool:
    """Return whether a head that has a least-squares start begins with it: a new one does."""
    is_new = not config.draft_model and newest_checkpoint(Path(config.out)) is None
    return is_new and config.start == "least_squares" and config.loss.needs_target


def build_evaluator(config: TrainConfig, source: StateSource, device: str) -> Evaluator:
    """Return trees on held-out prompts, by the weights of the target that the states come from where it can serve them.

    device: of training.
    """
    device, dtype = resolve_placement(config.eval.device or device, "auto", config.model)
    check_device(dtype, device)
    prompts = heldout_prompts(Path(config.data.path), config.eval)
    target = None
    if isinstance(source, OnlineTarget) and source.can_serve(torch.device(device), getattr(torch, dtype)):
        target = source.serving_target()
    return Evaluator(config.model, SERVED_BY.get(config.method, config.method), prompts, config.eval, device, target)


def _accelerator(config: TrainConfig) -> Any:
    import_transformers()  # before accelerate, which imports torchao too
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.utils import is_tensorboard_available, is_trackio_available
    except ImportError as error:
        raise MissingPackage("training", "accelerate", "train") from error
    use_threads(config.threads)
    device, _ = resolve_placement(config.device, "auto", config.model)
    check_device("float32", device)
    if torch.device(device).type == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(device)  # the GPU that accelerate takes
    found = {"trackio": is_trackio_available(), "tensorboard": is_tensorboard_available()}
    accelerator = Accelerator(
        mixed_precision="bf16" if _dtype(config) == torch.bfloat16 else "no",
        gradient_accumulation_steps=config.optimizer.gradient_accumulation_steps,
        cpu=torch.device(device).type == "cpu",
        log_with=[name for name, is_there in found.items() if is_there] or None,
        project_dir=config.out,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if not accelerator.is_main_process:  # the first process warns for all
        logging.getLogger("eyas").setLevel(logging.ERROR)
    accelerator.init_trackers(Path(config.out).name)
    return accelerator
