"""Cuts a loaded model to one rank's part, as the tensor-parallel plan of transformers says.

Ranks exchange values in two places: they sum the output of a layer split by rows, and gather an output split by columns.
Each rank keeps the logits of its part of the vocabulary; `SharedVocabulary` says what rank 0 gets of them.
A rank reads its part of plain weights from their files, straight to its device; others are loaded whole and cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from eyas.arrays import Bools
from eyas.config.target_limits import can_split_heads, quantisation
from eyas.device.transfer import upload
from eyas.errors import CheckpointError
from eyas.kernels.arguments import NO_SLOTS, Draws, has_filters
from eyas.kernels.by_device import sampling_kernels
from eyas.models.checkpoint import StoredTensor, WeightFiles, explained
from eyas.models.inputs import Segment
from eyas.models.parallel.plans import GATHERED, plan_of, style_of
from eyas.protocol.commit import NoiseKey
from eyas.sampling.acceptance import StepLogits
from eyas.sampling.sharded import (
    best_of_races,
    candidates,
    draw_candidates,
    likely_logits,
    takes_candidates,
    warm_up_search,
)

# How the plan's styles split a layer. Styles that only matter to gradients split nothing. Embeddings stay whole: a lookup
# in local memory is cheaper than a sum over ranks.
COLUMNS = frozenset({"colwise", "colwise_rep", "colwise_gather_output"})
ROWS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})
PACKED = frozenset({"packed_colwise"})
SUMMED = frozenset({"moe_tp_experts", "all_reduce"})
# Styles of our own plans: parts of the last dimension, and what the first rank adds for all.
LAST = frozenset({"last_dimension"})
FIRST = frozenset({"first_rank"})
WHOLE = frozenset({
    "replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "local_params",
    "mla_kv_a_proj",
})  # fmt: skip

# Quantised weights that are tensors which can be cut, scales included.
SPLIT_QUANTISATIONS = ("torchao",)

LM_HEAD = "lm_head.weight"
# How a row is drawn from parts: by the race alone, by a race over what top-p and min-p keep, or from listed tokens.
_PLAIN, _FILTERED, _LISTED = range(3)
# Dimensions of the weight of a norm for each head.
HEADS_AND_WIDTH = 2
_KV_PROJECTIONS = ("k_proj", "v_proj")
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")


@dataclass(frozen=True)
class Shard:
    """The part of every split layer that a rank holds."""

    rank: int
    size: int

    def cut(self, tensor: Tensor | StoredTensor, dim: int, parts: int = 1) -> Tensor:
        """Return this rank's slice of each of the `parts` equal parts of a dimension, as a copy. Nothing else is read.

        Raises CheckpointError if the ranks do not divide the dimension,
        or cut through groups of quantised weights.
        """
        if tensor.shape[dim] % (parts * self.size):
            raise CheckpointError(f"a width of {tensor.shape[dim]} cannot be split over {self.size} ranks")
        dim %= tensor.ndim
        width = tensor.shape[dim] // (parts * self.size)
        starts = [(part * self.size + self.rank) * width for part in range(parts)]
        try:
            slices = [tensor.narrow(dim, start, width) for start in starts]
            return slices[0].clone() if parts == 1 else torch.cat(slices, dim)
        except (NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
            raise CheckpointError(
                f"weights of the kind {type(tensor).__name__} cannot be split over {self.size} ranks in {parts} parts of "
                f"width {width}: {error}"
            ) from error

    def of_heads(self, num_heads: int) -> Shard:
        """Return this rank's part of the key-value heads. With fewer heads than ranks, neighbouring ranks hold the same
        head.

        Example: 2 heads over 4 ranks give ranks 0 and 1 the first head, 2 and 3 the second.
        Raises CheckpointError if the parts would differ in size.
        """
        if not can_split_heads(num_heads, self.size):
            raise CheckpointError(
                f"{self.size} ranks cannot share {num_heads} key-value heads evenly; "
                "engine.tensor_parallel_size must divide them or be a multiple of them"
            )
        parts = min(num_heads, self.size)
        return Shard(self.rank * parts // self.size, parts)


def load_shard(
    make_model: Callable[[], Any], files: WeightFiles, device: torch.device, shard: Shard, kv_heads: Sequence[int]
) -> Any | None:
    """Return a causal LM with this rank's part of the weights on `device`, and the exchanges between ranks.

    make_model: makes the architecture. None if parts of its weights cannot be read, because they have other names in the
    files, other shapes, are quantised, or some are buffers. Raises CheckpointError as `shard_model`.
    """
    found = weightless_model(make_model, files)
    if found is None:
        return None
    model, names = found
    shard_model(model, shard, kv_heads, lambda name: files[names[name]])
    tie_head(model, names)
    return model.to(device)


def tie_head(model: Any, names: Mapping[str, str]) -> None:
    """Let the output head share the weight that it is tied to, unless a rank has a part of it.

    names: see `weightless_model`.
    """
    embedding = names.get(LM_HEAD, LM_HEAD)  # another tensor's name if they are tied
    if embedding != LM_HEAD and model.lm_head.weight.shape == model.get_parameter(embedding).shape:
        model.lm_head.weight = model.get_parameter(embedding)


def weightless_model(make_model: Callable[[], Any], files: WeightFiles) -> tuple[Any, dict[str, str]] | None:
    """Return a causal LM whose parameters are on the meta device, and the name of each parameter in the files.

    None if parts of its weights cannot be read: see `load_shard`.
    """
    if not files.can_read_parts:
        return None
    with explained(f"transformers cannot make a model of the config in {files.folder}"), weightless():
        model = make_model()
    names = {name: name for name, _ in model.named_parameters()}
    if LM_HEAD in names and LM_HEAD not in files.names and model.config.get_text_config().tie_word_embeddings:
        names[LM_HEAD] = _embedding_name(model)
    keeps_float32 = any(getattr(model, f"_keep_in_fp32_modules{kind}", None) for kind in ("", "_strict"))
    has_buffers = bool(model.state_dict().keys() - names.keys())  # in the files, such as the scales of Gemma 4's layers
    if quantisation(model.config) or keeps_float32 or has_buffers:
        return None
    if any(name not in files.names or files[name].shape != model.get_parameter(own).shape for own, name in names.items()):
        return None
    return model, names


def _embedding_name(model: Any) -> str:
    """Return the name of the parameter that looks up tokens."""
    weight = model.get_input_embeddings().weight
    names: list[str] = [name for name, parameter in model.named_parameters() if parameter is weight]
    return names[0]


@contextmanager
def weightless() -> Iterator[None]:
    """Make modules of this thread, inside the context, without memory for their parameters. Buffers have their values."""
    own = threading.get_ident()

    def drop(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        return nn.Parameter(param.to("meta"), requires_grad=False) if threading.get_ident() == own else None

    registration = register_module_parameter_registration_hook(cast(Callable[..., None], drop))  # what it returns is taken
    try:
        yield
    finally:
        registration.remove()


def shard_model(
    model: Any, shard: Shard, kv_heads: Sequence[int], stored: Callable[[str], StoredTensor] | None = None
) -> None:
    """Cut the weights of a causal LM in place and add the exchanges between ranks. Every rank must do the same.

    Raises CheckpointError for a model without a plan, with weights quantised by something other than torchao, with an
    unknown style, or with a width or heads that the ranks cannot share.

    Args:
        kv_heads: key-value heads of every layer.
        stored: where to read a parameter, if the model has none.
    """
    plan, name = plan_of(model), type(model).__name__
    if not plan:
        raise CheckpointError(f"{name} has no tensor-parallel plan in transformers; set engine.tensor_parallel_size to 1")
    if (kind := quantisation(model.config)) not in ("", *SPLIT_QUANTISATIONS):
        raise CheckpointError(
            f"ranks cannot share weights of {name} quantised by {kind}; set engine.tensor_parallel_size to 1"
        )
    if unknown := set(plan.values()) - COLUMNS - ROWS - PACKED - SUMMED - LAST - FIRST - WHOLE:
        raise CheckpointError(
            f"the tensor-parallel plan of {name} asks for {', '.join(sorted(unknown))}, which Eyas does not support; set "
            "engine.tensor_parallel_size to 1"
        )
    if any(_reads_whole_width(module) for module in model.modules()):
        raise CheckpointError(
            f"{name} has MLPs that compare all of their activations (activation_sparsity), which ranks hold in parts; set "
            "engine.tensor_parallel_size to 1"
        )
    head, exchanges = model.get_output_embeddings(), Exchanges(shard)
    model.exchanges = exchanges
    model.register_forward_pre_hook(lambda module, args, named: exchanges.start(named["packed"].tokens), with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: exchanges.end())
    for path, module in list(model.named_modules()):
        style = style_of(plan, path) or _norm_style(plan, path, module)
        if style in GATHERED and int(cast(Any, module).out_features) % shard.size:
            style = None  # every rank gets the whole output anyway
        for key, _ in list(module.named_parameters(recurse=False)):
            whole = stored(f"{path}.{key}") if stored else getattr(module, key)
            own_style, own_shard = style_of(plan, f"{path}.{key}") or style, _layer_shard(path, style, shard, kv_heads)
            if (part := _cut_parameter(whole, own_style, own_shard)) is not None:
                setattr(module, key, nn.Parameter(part, requires_grad=False))
        if module is not head:
            _add_exchange(module, style, exchanges)


def shares_vocabulary(model: Any, shard: Shard) -> bool:
    """Return whether each rank computes the logits of its own part of the vocabulary."""
    head = model.get_output_embeddings()
    path = next(path for path, module in model.named_modules() if module is head)
    return style_of(plan_of(model), path) in GATHERED and head.out_features % shard.size == 0


def splits_heads(model: Any) -> bool:
    """Return whether each rank holds keys and values of its own heads only."""
    return any(path.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise" for path, style in plan_of(model).items())


def _layer_shard(path: str, style: str | None, shard: Shard, kv_heads: Sequence[int]) -> Shard:
    """Return the part of a layer: key and value projections are split by whole heads."""
    *above, name = path.split(".")
    if style != "colwise" or name not in (*_KV_PROJECTIONS, "k_norm"):
        return shard
    return shard.of_heads(kv_heads[int(next(part for part in reversed(above) if part.isdigit()))])


def _norm_style(plan: dict[str, str], path: str, module: nn.Module) -> str | None:
    """Return how to split a norm of queries or keys that has weights for each head: as its projection; plans say nothing."""
    above, _, name = path.rpartition(".")
    weight = getattr(module, "weight", None)
    if name not in ("q_norm", "k_norm") or not isinstance(weight, Tensor) or weight.ndim != HEADS_AND_WIDTH:
        return None
    return style_of(plan, f"{above}.{name[0]}_proj")


def _reads_whole_width(module: nn.Module) -> bool:
    """Return whether an MLP drops activations by the mean and deviation of all, as in Gemma 3n."""
    return bool(getattr(module, "activation_sparsity", 0))


def _cut_parameter(whole: Tensor | StoredTensor, style: str | None, shard: Shard) -> Tensor | None:
    """Return this rank's part of a parameter; None where it is the whole one, which is there already."""
    if style in COLUMNS | PACKED:
        return shard.cut(whole, max(whole.ndim - 2, 0), parts=2 if style in PACKED else 1)
    if style in LAST or (style in ROWS and whole.ndim > 1):
        return shard.cut(whole, -1)
    if style in FIRST | ROWS and shard.rank > 0:  # a bias is added once
        return torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
    return whole.narrow(0, 0, whole.shape[0]) if isinstance(whole, StoredTensor) else None


class Exchanges:
    """Exchanges of ranks within a pass. A rank that has no memory for the rest of it takes part with zeros.

    So the others do not wait for ever, and the next command finds all ranks in step. The result of such a pass is not read.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.known: list[tuple[bool, int, torch.dtype]] = []  # of a pass: gathers or sums, numbers of a row, type
        self.own: list[tuple[bool, int, torch.dtype]] = []  # of the current pass so far
        self.num_rows = 0
        self.is_running = False  # whether a pass has begun and not ended

    def start(self, tokens: Tensor) -> None:
        """Begin a pass of these rows."""
        self.num_rows, self.own, self.is_running = len(tokens), [], True

    def end(self) -> None:
        """End a pass. All passes of a model exchange the same for each row."""
        self.known, self.is_running = self.own, False

    def sum(self, output: Tensor) -> Tensor:
        """Return the sum over ranks, in place."""
        dist.all_reduce(output)
        self.own.append((False, output.numel() // self.num_rows, output.dtype))
        return output

    def gather(self, output: Tensor) -> Tensor:
        """Return the outputs of all ranks, side by side."""
        parts = [torch.empty_like(output) for _ in range(self.shard.size)]
        dist.all_gather(parts, output.contiguous())
        self.own.append((True, output.numel() // self.num_rows, output.dtype))
        return torch.cat(parts, -1)

    @property
    def can_finish(self) -> bool:
        """Return whether it is known what is left: a pass has begun and not ended, and another one was whole."""
        return self.is_running and bool(self.known)

    def finish(self, device: torch.device) -> None:
        """Take part in what is left of a pass."""
        for gathers, width, dtype in self.known[len(self.own) :]:
            zeros = torch.zeros(self.num_rows * width, dtype=dtype, device=device)
            if gathers:
                dist.all_gather([torch.empty_like(zeros) for _ in range(self.shard.size)], zeros)
            else:
                dist.all_reduce(zeros)
        self.is_running = False


@dataclass(frozen=True)
class SumOverRanks:
    """A forward hook after which a module gives the sum over ranks."""

    exchanges: Exchanges

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        return self.exchanges.sum(output)


def _add_exchange(module: nn.Module, style: str | None, exchanges: Exchanges) -> None:
    """Let ranks sum or gather the module's output."""
    shard = exchanges.shard

    def split_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].chunk(shard.size, -1)[shard.rank], *args[1:])

    def gather_output(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return exchanges.gather(output)

    if style == "rowwise_split_input":
        module.register_forward_pre_hook(split_input)
    if style in ROWS | SUMMED:
        module.register_forward_hook(SumOverRanks(exchanges))
    elif style in GATHERED:
        module.register_forward_hook(gather_output)


class SharedVocabulary:
    """The logits of a pass on ranks that hold a part of the vocabulary each.

    Every rank draws over its own tokens, and rank 0 takes the best of all: 12 bytes a row. With top-p or min-p ranks find
    first which tokens the whole row keeps: 980 bytes more. With top-k each rank sends its k likeliest tokens, 8 bytes each,
    and rank 0 draws. Whole logits go to rank 0 only for segments without a noise key.
    """

    def __init__(self, shard: Shard, vocab_size: int) -> None:
        self._shard = shard
        self._vocab_size = vocab_size

    def warm_up(self, device: torch.device) -> None:
        """Compile what a rank draws with, so that no request waits for that. Nothing is exchanged."""
        draws, logits = Draws([NoiseKey(0, 1.0)], [0]), self.placeholder(1, device)
        warm_up_search(logits)
        found = sampling_kernels(logits).race(logits, draws, 0, self._vocab_size)
        best_of_races(found.repeat(self._shard.size, 1, 1), draws, self._vocab_size)

    def placeholder(self, num_rows: int, device: torch.device) -> Tensor:
        """Return what a rank gives `collect` for a pass whose result is not read."""
        return torch.zeros(num_rows, self._vocab_size // self._shard.size, device=device)

    def collect(self, segments: Sequence[Segment], logits: Tensor) -> StepLogits:
        """Return what rank 0 gets, of this rank's logits float32 [R, V / ranks], which may be overwritten.

        All ranks must call it; the others get nothing.
        """
        is_drawn = tuple(segment.noise_key is not None for segment in segments)
        of_rows = np.repeat(is_drawn, [len(segment.logits_indices) for segment in segments])
        keys = [s.noise_key for s in segments if s.noise_key is not None]
        positions = [s.positions[s.logits_indices] + 1 for s in segments if s.noise_key is not None]
        draws = Draws(keys, np.concatenate([NO_SLOTS, *positions]), list(map(len, positions)))
        tokens = torch.empty(0, dtype=torch.int64, device=logits.device)
        if len(draws):
            tokens = self._draw(_selected(logits, of_rows), draws)
        whole = logits.new_empty((0, self._vocab_size))
        if len(draws) < len(logits):
            parts = self._gather(_selected(logits, ~of_rows))
            whole = whole if parts is None else parts.transpose(0, 1).flatten(1)
        return StepLogits(whole, tokens, is_drawn)

    def _draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return one token for each row on rank 0, int64 [N]; the others get nothing of use. logits: [N, V / ranks]."""
        first_id, size = self._shard.rank * logits.shape[1], self._vocab_size
        kernels = sampling_kernels(logits)
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        kinds = draws.by_row(list(map(_kind_of, draws.keys)), np.int64)
        for kind in np.unique(kinds).tolist():
            own = draws.taken(np.flatnonzero(kinds == kind))
            rows = _selected(logits, kinds == kind)
            if kind == _FILTERED:
                rows = likely_logits(rows, own, self._shard.rank, self._shard.size)
            most = max(key.top_k for key in own.keys)
            found = candidates(rows, most, first_id) if kind == _LISTED else kernels.race(rows, own, first_id, size)
            if (parts := self._gather(found)) is not None:
                drawn = draw_candidates(parts, own, size) if kind == _LISTED else best_of_races(parts, own, size)
                if len(own) == len(draws):
                    return drawn
                tokens.index_copy_(0, upload(np.flatnonzero(kinds == kind), logits.device), drawn)
        return tokens

    def _gather(self, own: Tensor) -> Tensor | None:
        """Return the tensors of all ranks [ranks, ...] on rank 0."""
        parts = own.new_empty((self._shard.size, *own.shape)) if self._shard.rank == 0 else None
        dist.gather(own.contiguous(), None if parts is None else list(parts.unbind()))
        return parts


def _kind_of(key: NoiseKey) -> int:
    if takes_candidates(key):
        return _LISTED
    return _FILTERED if has_filters(key) else _PLAIN


def _selected(logits: Tensor, wanted: Bools) -> Tensor:
    """Return the wanted rows; without a copy if that is all."""
    return logits if wanted.all() else logits[upload(np.flatnonzero(wanted), logits.device)]
