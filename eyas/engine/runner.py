"""Runs the rows of a step through the target in one forward pass; features, or their states, go beside the KV."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.device.transfer import upload
from eyas.emulation.device import EmulatedBackend
from eyas.engine.sequence import ScheduledSequence
from eyas.errors import Unavailable
from eyas.kernels.arguments import Draws
from eyas.models.backends.base import ForwardBackend
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.inputs import Segment, SegmentRows, Segments
from eyas.models.parallel.shards import Exchanges
from eyas.models.parallel.workers import TargetWorkers
from eyas.models.target import TargetModel, TargetOutput
from eyas.protocol.commit import NoiseKey
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import DrawnRows, StepLogits, pack_trees
from eyas.sampling.verify import can_draw_in_parts

log = logging.getLogger(__name__)


class ModelRunner:
    """Owner of the target, its KV cache and the part of the draft head that runs beside it.

    Args:
        backend: how forward passes run; plainly by default.
        workers: the other ranks that compute. The KV cache has features, or the states that these are made of: then
            `features` fuses those that a drafter asks for.
    """

    def __init__(
        self,
        target: TargetModel,
        kv_cache: KVCache,
        fuser: FeatureFuser | None,
        backend: ForwardBackend | None = None,
        workers: TargetWorkers | None = None,
    ) -> None:
        self.target = target
        self.kv_cache = kv_cache
        self.backend: ForwardBackend = backend or target
        self._fuser = fuser
        if fuser is not None and target.device.type == "cpu" and kv_cache.features.shape[1] == fuser.state_width:
            kv_cache.state_layers = target.aux_hidden_state_layers
        self._workers = workers if workers and workers.size > 1 else None

    def forward(self, segments: Seq[Segment]) -> StepLogits:
        """Run one forward pass on every rank: logits of each segment's `logits_indices`, or tokens drawn there.

        Raises torch.OutOfMemoryError on rank 0 if a rank has no memory for the pass, and on that rank. All stay in step.
        """
        with self._workers.forward(segments) if self._workers else nullcontext():
            try:
                packed = self.backend.pack(segments)
                out = self.backend.forward(packed, self.kv_cache)
                self._store_features(packed.slots, out)
                shared = self.target.shared_vocabulary
                return shared.collect(segments, out.logits) if shared else StepLogits(out.logits)
            except torch.OutOfMemoryError as error:
                reason = str(error)
            packed = out = None  # type: ignore[assignment]  # what the pass has made so far
            self._finish_exchanges(segments, reason)
            raise torch.OutOfMemoryError(reason)

    def _finish_exchanges(self, segments: Seq[Segment], reason: str) -> None:
        """Take part in what other ranks exchange in a pass that this one has no memory for."""
        exchanges: Exchanges | None = getattr(self.target.model, "exchanges", None)
        if exchanges is None:
            return
        if not exchanges.can_finish:  # in a captured pass, around it, or in the first one: it is not known what is left
            raise Unavailable(f"a rank has no memory beside its layers, so ranks are out of step: {reason}")
        device, shared = self.target.device, self.target.shared_vocabulary
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            exchanges.finish(device)
            if shared:
                num_logits = sum([len(segment.logits_indices) for segment in segments])
                shared.collect(segments, shared.placeholder(num_logits, device))
        except torch.OutOfMemoryError as error:  # others wait for this rank, and rank 0 for their answers
            raise Unavailable(f"a rank has no memory to end a pass, so ranks are out of step: {error}") from error

    @property
    def runs_beside_host(self) -> bool:
        """Return whether `forward` returns while the device still computes."""
        return self.target.device.type == "cuda" or isinstance(self.backend, EmulatedBackend)

    def features(self, slots: Slots) -> Tensor:
        """Return fused features [n, H] of slots; H is 0 without a head.

        Waits for an emulated device, as their copy would.
        """
        if isinstance(self.backend, EmulatedBackend):
            self.backend.device.synchronize()
        features = self.kv_cache.features
        found = features.index_select(0, upload(slots, features.device))
        if self._fuser is None or not self.kv_cache.state_layers:
            return found
        with torch.inference_mode():
            return self._fuser(found)  # type: ignore[no-any-return]

    def _store_features(self, slots: Tensor, out: TargetOutput) -> None:
        """Keep the features of a pass, or the states that `features` fuses."""
        if self._fuser is not None and out.aux_hidden_states is not None:
            with torch.inference_mode():
                states = out.aux_hidden_states if self.kv_cache.state_layers else self._fuser(out.aux_hidden_states)
                self.kv_cache.features.index_copy_(0, slots, states)


def slot_width(fuser: FeatureFuser | None, on_gpu: bool) -> int:
    """Return numbers of a slot beside its KV: of features, or on a CPU of the states that they are made of; 0 without a
    head.

    A CPU has memory for states, and less time than a GPU to fuse those that no drafter asks for.
    """
    if fuser is None:
        return 0
    return fuser.width if on_gpu else fuser.state_width


def drawn_rows(batch: Seq[ScheduledSequence]) -> DrawnRows:
    """Return the rows of a step at which tokens are drawn: all nodes of trees, and the ends of prompts."""
    found, places, keys, ends = list[DraftTree](), list[int](), list[NoiseKey](), list[int]()
    for number, scheduled in enumerate(batch):
        tree, is_prompt = scheduled.tree, scheduled.tree is None
        tree = scheduled.drawn_tree if tree is None else tree
        if tree is not None:
            found.append(tree)
            places.append(number)
            keys.append(scheduled.sequence.request.noise_key)
            ends.append(scheduled.first + (len(scheduled.slots) if is_prompt else 1))
    drawing = np.array(places, np.int64)
    if not found:
        return DrawnRows(None, drawing, len(batch), Draws([], drawing))
    trees = pack_trees(found)
    at = np.repeat(ends, trees.nodes.counts) + trees.depths
    return DrawnRows(trees, drawing, len(batch), Draws(keys, at, trees.nodes.counts))


def step_segments(batch: Seq[ScheduledSequence], rows: DrawnRows, draws_on_ranks: bool = False) -> Seq[Segment]:
    """Return the rows of a step's sequences for a pass: prompt tokens, and the nodes of trees.

    Trees alone are laid out at once, and no segment is made before somebody reads it.

    Args:
        batch: the sequences.
        rows: where tokens are drawn, as `drawn_rows` gives it.
        draws_on_ranks: whether ranks draw, where a request allows it.
    """
    num_trees = sum([scheduled.tree is not None for scheduled in batch])
    if rows.trees is None or not num_trees:
        return [_prompt_segment(scheduled, draws_on_ranks) for scheduled in batch]
    are_trees = num_trees == len(batch)
    # Next to prompts, the segments of their ends are made too and not used: only those of trees are.
    drawing = batch if are_trees else [batch[place] for place in rows.places.tolist()]
    nodes = rows.trees.nodes
    positions = rows.draws.positions - 1  # a node's token is drawn for the position after it
    # of a prompt only the last row is drawn at
    slots = np.concatenate([s.slots if s.tree is not None else s.slots[-1:] for s in drawing])
    segments = Segments(
        SegmentRows(nodes.tokens, positions, slots, logits_indices=np.arange(len(slots)), counts=nodes.counts),
        prefixes=[scheduled.sequence.slots[: scheduled.first] for scheduled in drawing],
        noise_keys=[_rank_key(scheduled) for scheduled in drawing] if draws_on_ranks else [None] * len(drawing),
        tables=[scheduled.sequence.table for scheduled in drawing],
        states=[scheduled.states for scheduled in drawing],
        trees=rows.trees,
    )
    if are_trees:
        return segments
    own = dict(zip(rows.places.tolist(), segments, strict=True))
    return [
        own[number] if scheduled.tree is not None else _prompt_segment(scheduled, draws_on_ranks)
        for number, scheduled in enumerate(batch)
    ]


def _prompt_segment(scheduled: ScheduledSequence, draws_on_ranks: bool) -> Segment:
    """Return prompt tokens of one sequence. Logits are wanted where a token is drawn, and where its prompt asks for them."""
    sequence, first, num_rows = scheduled.sequence, scheduled.first, len(scheduled.slots)
    num_logits = len(scheduled.logit_rows.prompt_tokens) + scheduled.logit_rows.num_drawn
    return Segment(
        tokens=np.array(sequence.tokens[first : first + num_rows], dtype=np.int64),
        positions=first + np.arange(num_rows),
        slots=scheduled.slots,
        prefix=sequence.slots[: sequence.computed],
        visible=None,
        logits_indices=np.arange(num_rows - num_logits, num_rows),
        noise_key=_rank_key(scheduled) if draws_on_ranks else None,
        table=sequence.table,
        states=scheduled.states,
    )


def _rank_key(scheduled: ScheduledSequence) -> NoiseKey | None:
    """Return what ranks draw a sequence's tokens with; None if rank 0 draws them from all logits."""
    return scheduled.sequence.request.noise_key if can_draw_in_parts(scheduled.logit_rows) else None
