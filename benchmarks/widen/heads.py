"""Draft heads of all kinds in a large shape, beside their widened target; and the writing of both.

A head becomes as wide as the target, with the target's heads and MLP. Tapped layers are those that hold the same states.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.widen.sparse import SparseTensor, write_sparse
from benchmarks.widen.target import (
    SHAPES,
    Axis,
    Shape,
    WideModel,
    Widening,
    wide_layer,
    widen_sizes,
    widen_target,
)
from eyas.bench.report import number
from eyas.config.file_values import get_setting
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.block_config import (
    BlockHeadConfig,
    block_config_json,
    block_tensor_shapes,
    read_block_config,
)
from eyas.models.heads.block_config import (
    canonical_name as canonical_block_name,
)
from eyas.models.heads.eagle import config_json
from eyas.models.heads.eagle_config import HeadWiring, Kind, canonical_name, read_head_config, tensor_shapes
from eyas.models.heads.hydra import HYDRA_FILES, HydraMLP, load_hydra, read_hydra_config
from eyas.models.heads.layers import LayerSizes, read_layer_sizes
from eyas.models.heads.medusa import load_medusa
from eyas.progress import Progress

EAGLE_KINDS: Mapping[str, Kind] = {"eagle2": "eagle", "eagle3": "eagle3", "peagle": "peagle"}
BLOCK_KINDS = ("dflash", "dflash2", "dspark")
# Headroom on the disk beside what is written.
SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of the small target, and of the shape that it gets, that heads need."""

    checkpoint: Checkpoint
    layers: LayerSizes
    num_layers: int
    vocab_size: int
    shape: Shape
    dtype: torch.dtype

    @classmethod
    def read(cls, path_or_id: str, shape: Shape, dtype: torch.dtype) -> TargetSizes:
        """Read the sizes of the target in a folder. Raises CheckpointError."""
        checkpoint = Checkpoint(path_or_id)
        config, source = checkpoint.text_config, checkpoint.config_file
        num_layers, vocab = (get_setting(int, config, key, source) for key in ("num_hidden_layers", "vocab_size"))
        return cls(checkpoint, read_layer_sizes(config, source), num_layers, vocab, shape, dtype)

    @property
    def new_vocab_size(self) -> int:
        return self.shape.vocab_size or self.vocab_size

    @property
    def pads(self) -> bool:
        """Return whether the vocabulary grows."""
        return self.new_vocab_size > self.vocab_size

    def draft_axis(self, count: int, is_whole: bool) -> Axis:
        """Return the axis of a draft vocabulary: as large as the shape's, as far as there are new tokens for it.

        is_whole: whether it is the target's.
        """
        if is_whole:
            return Axis.first(count, self.new_vocab_size)
        room = count + self.new_vocab_size - self.vocab_size
        return Axis.first(count, max(count, min(self.shape.draft_vocab_size, room)))

    def draft_ids(self, ids: Tensor, axis: Axis) -> Tensor:
        """Target ids of the draft tokens, with new tokens for the new ones."""
        return torch.cat([ids, self.vocab_size + torch.arange(axis.size - len(ids))])

    def wiring(self, wiring: HeadWiring) -> HeadWiring:
        """Return the same states, where the layers of the shape hold them."""
        layers = [x if x < 0 else wide_layer(x, self.num_layers, self.shape) for x in wiring.aux_hidden_state_layers]
        return replace(wiring, aux_hidden_state_layers=tuple(layers))


def widen_head(path_or_id: str, target: TargetSizes) -> WideModel:
    """Return a draft head, or a small draft model, in the target's shape.

    Raises CheckpointError for a head that cannot be widened exactly, ConfigError for a shape that is too small.
    """
    head, method = Checkpoint(path_or_id), DraftHead(path_or_id).method
    if method in EAGLE_KINDS:
        return _widen_eagle(head, EAGLE_KINDS[method], target)
    if method in BLOCK_KINDS:
        return _widen_block(head, target)
    if method in ("medusa", "hydra"):
        return (_widen_medusa if method == "medusa" else _widen_hydra)(head, target)
    if method == "sps":
        shape = replace(SHAPES.get(target.shape.small, target.shape), vocab_size=target.new_vocab_size)
        return widen_target(path_or_id, shape, target.dtype, head.folder.name)
    raise CheckpointError(f"cannot widen {head.folder}, which is for the method {method}; leave it out")


def _widen_eagle(head: Checkpoint, kind: Kind, target: TargetSizes) -> WideModel:
    folder, config = head.folder, read_head_config(head, target.checkpoint.text_config, kind)
    _refuse(
        folder,
        {
            "it is not as wide as its target": config.hidden != target.layers.hidden,
            "its features are normed": target.pads and config.input_norms != "none",
            "its residual is normed": target.pads and config.wiring.norm_before_residual,
            "its next step reads a normed state": target.pads and config.wiring.output == "normed",
        },
    )
    is_whole = kind == "eagle"  # it has the target's lm_head
    draft = target.draft_axis(config.draft_vocab_size, is_whole)
    wide = widen_sizes(
        config, target.shape, target.pads, folder, target_hidden=target.shape.hidden, vocab_size=target.new_vocab_size,
        draft_vocab_size=draft.size, wiring=target.wiring(config.wiring),
    )  # fmt: skip
    vocab = Axis.first(target.vocab_size, target.new_vocab_size)
    state = Axis.first(target.layers.hidden, target.shape.hidden)
    states = Axis.joined([state] * (2 if kind == "eagle" else len(config.aux_hidden_state_layers)))
    axes = {"vocab": vocab, "draft": draft, "state": state, "states": states}
    rest = Widening(config, wide, target.pads, False, axes, target.dtype)
    # The first layer of EAGLE-3 reads embedding and feature side by side; it is called midlayer.
    first = Widening(config, wide, target.pads, False, {**axes, "input": Axis.joined([state] * 2)}, target.dtype)
    known = tensor_shapes(config)
    tensors = {canonical_name(name, kind): tensor for name, tensor in head.tensors().items()}
    ids = torch.arange(config.draft_vocab_size) + tensors.pop("d2t", 0)
    tensors.pop("t2d", None)
    placed = [
        (first if name.startswith("midlayer.") else rest).place(name, tensor)
        for name, tensor in tensors.items()
        if name in known
    ]
    maps = [] if is_whole else _draft_maps(target.draft_ids(ids, draft), target.new_vocab_size)
    return WideModel(folder.name, config_json(wide), [*placed, *maps])


def _widen_block(head: Checkpoint, target: TargetSizes) -> WideModel:
    folder, config = head.folder, read_block_config(head, target.checkpoint.text_config)
    _refuse(
        folder,
        {
            "it is not as wide as its target": config.hidden != target.layers.hidden,
            "its logits are soft-capped": target.pads and config.softcap > 0,
            "its features are the target's final states": target.pads and config.aux_hidden_state_layers[0] < 0,
        },
    )
    is_whole = config.draft_vocab_size == target.vocab_size
    draft = target.draft_axis(config.draft_vocab_size, is_whole)
    wide = widen_sizes(
        config, target.shape, target.pads, folder, target_hidden=target.shape.hidden,
        num_target_layers=target.shape.num_layers, vocab_size=target.new_vocab_size, draft_vocab_size=draft.size,
        wiring=target.wiring(config.wiring),
    )  # fmt: skip
    widening = Widening(config, wide, target.pads, True, _block_axes(config, wide, target, draft), target.dtype)
    tensors = {canonical_block_name(name): tensor for name, tensor in head.tensors().items()}
    known, ids = block_tensor_shapes(config), torch.arange(config.draft_vocab_size) + tensors.pop("d2t", 0)
    tensors.pop("t2d", None)
    placed = [widening.place(name, tensor) for name, tensor in tensors.items() if name in known]
    maps = [] if is_whole else _draft_maps(target.draft_ids(ids, draft), target.new_vocab_size)
    return WideModel(folder.name, block_config_json(wide), [*placed, *maps])


def _block_axes(c: BlockHeadConfig, wide: BlockHeadConfig, target: TargetSizes, draft: Axis) -> dict[str, Axis]:
    """Axes of what stands on the backbone. Rows of a convolution's projection are taps of groups."""
    hidden, rank = Axis.first(c.hidden, wide.hidden), Axis.first(c.markov_rank or c.selector_rank or 1)
    groups = Axis.first(c.hidden // c.conv_group, wide.hidden // c.conv_group)
    return {
        "vocab": Axis.first(target.vocab_size, target.new_vocab_size),
        "draft": draft,
        "states": Axis.joined([hidden] * len(c.aux_hidden_state_layers)),
        "rank": rank,
        "gate": Axis.joined([hidden, rank]),
        "joint": Axis.joined([rank] * 3),
        "memory": Axis.joined([rank, rank, hidden]),
        "confidence": Axis.joined([hidden, rank]) if c.confidence_with_markov else hidden,
        "groups": Axis.joined([groups] * max(1, 2 * c.conv_kernel)),
    }


def _widen_medusa(checkpoint: Checkpoint, target: TargetSizes) -> WideModel:
    """Widen Medusa heads in vLLM's layout. The target's final state has the constant; blocks pass it on."""
    head = load_medusa(checkpoint, target.checkpoint)
    widening, hidden = _hidden_only(target)
    is_whole = len(head.draft_ids) == target.vocab_size
    draft = target.draft_axis(len(head.draft_ids), is_whole)
    tensors = []
    for layer, (weights, biases) in enumerate(zip(head.weights, head.biases, strict=True)):
        for block in range(head.num_heads):
            name = f"blocks.{block}.layers.{layer}"
            tensors.append(widening.put(f"{name}.weight", weights[block], hidden, hidden))
            tensors.append(widening.put(f"{name}.bias", biases[block, 0], Axis.first(1), hidden))
    for index, output in enumerate(head.outputs):
        tensors.append(widening.put(f"lm_heads.{index}.weight", output, draft, hidden, kind="lm_head"))
    tensors += [] if is_whole else [SparseTensor.dense("token_map", target.draft_ids(head.draft_ids, draft))]
    shared = len(head.outputs) == 1 < head.num_heads
    changed = {"logit_scale": 1.0, "original_lm_head": shared, "truncated_vocab_size": draft.size}
    config = {**checkpoint.config, **changed}
    return WideModel(checkpoint.folder.name, _resized(config, target), tensors)


def _widen_hydra(checkpoint: Checkpoint, target: TargetSizes) -> WideModel:
    """Widen a Hydra head, whose first block passes on the constant of the target's final state."""
    config = read_hydra_config(checkpoint)
    own_embedding = "input_embed_fn.weight" in checkpoint.tensors(HYDRA_FILES)
    _refuse(checkpoint.folder, {"it has a prefix layer": config.has_prefix, "it has an embedding of its own": own_embedding})
    head = load_hydra(checkpoint, target.checkpoint)
    widening, hidden = _hidden_only(target)
    is_whole = len(head.draft_ids) == target.vocab_size
    draft = target.draft_axis(len(head.draft_ids), is_whole)
    tensors: list[SparseTensor] = []
    for index, mlp in enumerate(head.heads):
        assert isinstance(mlp, HydraMLP)
        inputs = Axis.joined([hidden] * (index + 2))
        first = f"{config.block(index, 0)}."
        # The two layers of the first block stand one below the other.
        halves = zip(("res_connection", "linear"), *(part.chunk(2) for part in mlp.blocks[0].parameters()), strict=True)
        for part, weight, bias in halves:
            kind = "fc" if part == "res_connection" else ""
            tensors.append(widening.put(f"{first}{part}.weight", weight, hidden, inputs, kind=kind))
            tensors.append(widening.put(f"{first}{part}.bias", bias, Axis.first(1), hidden))
        for layer, block in enumerate(mlp.blocks[1:], 1):
            name = f"{config.block(index, layer)}.linear"
            tensors.append(widening.put(f"{name}.weight", block.weight, hidden, hidden))
            tensors.append(widening.put(f"{name}.bias", block.bias, Axis.first(1), hidden))
        output = config.output(index)
        tensors.append(widening.put(f"{output}.weight", mlp.output.weight, draft, hidden, kind="lm_head"))
        if mlp.output.bias is not None:
            tensors.append(widening.put(f"{output}.bias", mlp.output.bias, Axis.first(1), draft))
    tensors += [] if is_whole else [SparseTensor.dense("token_map", target.draft_ids(head.draft_ids, draft))]
    return WideModel(checkpoint.folder.name, _resized(checkpoint.config, target), tensors)


def _hidden_only(target: TargetSizes) -> tuple[Widening, Axis]:
    """Return the placement for heads without layers."""
    wide = widen_sizes(target.layers, target.shape, target.pads, target.checkpoint.folder)
    return Widening(target.layers, wide, target.pads, False, {}, target.dtype), Axis.first(target.layers.hidden, wide.hidden)


def _resized(config: Mapping[str, Any], target: TargetSizes) -> dict[str, Any]:
    sizes = {"hidden_size": target.shape.hidden, "vocab_size": target.new_vocab_size}
    return {key: sizes.get(key, value) for key, value in config.items()}


def _draft_maps(ids: Tensor, vocab_size: int) -> list[SparseTensor]:
    """d2t and t2d of a draft vocabulary."""
    marks = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return [SparseTensor.dense("d2t", ids - torch.arange(len(ids))), SparseTensor.dense("t2d", marks)]


def _refuse(folder: Path, reasons: Mapping[str, bool]) -> None:
    """Raises CheckpointError for a head that no constant can be led through, or that has other sizes."""
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise CheckpointError(f"cannot widen {folder}: {reason}; leave it out, or keep the vocabulary")


def widen(model: str, heads: Sequence[str], shape: Shape, out: Path, dtype: str, progress: Progress) -> list[Path]:
    """Widen a target to `out`/target and heads to folders of their names there; return the folders.

    Raises CheckpointError and ConfigError, before anything is written, and ConfigError if the disk is full.
    """
    stored = Checkpoint(model).text_config
    dtype = dtype if dtype != "auto" else str(stored.get("dtype") or stored.get("torch_dtype") or "float32")
    kind = getattr(torch, dtype)
    sizes = TargetSizes.read(model, shape, kind)
    models = [widen_target(model, shape, kind), *(widen_head(head, sizes) for head in heads)]
    folders = [out / each.name for each in models]
    _check_room(models, folders, out, progress)
    for each, folder in zip(models, folders, strict=True):
        progress.show(f"writing {folder}", total=each.nbytes)
        write_sparse(folder, each.tensors, progress.advance)
        (folder / "config.json").write_text(
            json.dumps({**each.config, "dtype": dtype, "torch_dtype": dtype}, indent=1) + "\n"
        )
        for file in each.files:
            shutil.copyfile(file, folder / file.name)
    return folders


def _check_room(models: Sequence[WideModel], folders: Sequence[Path], out: Path, progress: Progress) -> None:
    """Say what will be written. Raises ConfigError for folders that are in the way, and for a disk that is too full."""
    taken = [folder for folder in folders if folder.exists()]
    if taken or len(set(folders)) < len(folders):
        again = taken or [folder for folder in folders if folders.count(folder) > 1]
        raise ConfigError(f"{again[0]} is there already, or named twice; remove it, or choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    total, needed = (sum(sizes) for sizes in zip(*((each.nbytes, each.disk_bytes) for each in models), strict=True))
    free = shutil.disk_usage(out).free
    progress.print(
        f"{len(models)} models with {number(total / 1e9)} GB of tensors; files with holes take {number(needed / 1e9)} GB of "
        f"{number(free / 1e9)} GB that are free. Copies without holes take all of it."
    )
    if needed + SPARE_BYTES > free:
        raise ConfigError(f"{out} has no room for {number(needed / 1e9)} GB; choose a folder on another disk with --out")
