"""A small causal LM as drafter (Leviathan et al. 2023): committed tokens in, draft trees or sampled chains out.

Keys and values of a token depend only on the tokens before it. So what a tree computed for accepted tokens stays cached.
Legend: S sessions, L tree levels that are run, W rows of a level, P longest prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Ints
from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, DraftModelConfig, TreeConfig
from eyas.drafters.base import DraftContext, DraftWork
from eyas.drafters.neural import NeuralDrafter, check_tree, plan_tree_slots
from eyas.drafters.sessions import KVLedger, KVSession, make_kv_cache
from eyas.drafters.trees.growth import Expansion
from eyas.drafters.trees.rows import GrowthShape, Roots
from eyas.errors import ConfigError
from eyas.kernels.arguments import NO_SLOTS
from eyas.models.backends.base import ForwardBackend
from eyas.models.backends.cuda import KernelBackend
from eyas.models.backends.cuda_graphs import Capture, CaptureLimits, GraphBackend
from eyas.models.inputs import Segment
from eyas.models.target import TargetModel


@dataclass(frozen=True)
class TreeRows:
    """The rows that the last tree of a session ran through the model, [L, W] each.

    Attributes:
        tokens: token ids.
        parents: rows of their parents in the level above.
        slots: where their keys and values are.
    """

    tokens: Ints
    parents: Ints
    slots: Slots

    def path(self, tokens: Sequence[int]) -> Slots:
        """Return the slots of the rows that lead from the root along `tokens`, as far as there are any."""
        row, found = 0, []
        for level, token in enumerate(tokens[: len(self.tokens)]):
            (rows,) = np.nonzero((self.tokens[level] == token) & (self.parents[level] == row))
            if not len(rows):
                break
            row = int(rows[0])
            found.append(self.slots[level, row])
        return np.array(found, dtype=np.int64)


class ModelDrafter(NeuralDrafter[TreeRows]):
    """A small model with a KV cache of its own. A session's state is what its last tree ran.

    Raises ConfigError for a tree that the model cannot grow, and for a model with recurrent layers.

    Args:
        capture: how to capture whole trees as CUDA graphs.
    """

    def __init__(
        self,
        model: TargetModel,
        tree: TreeConfig,
        config: DraftingConfig,
        draft_model: DraftModelConfig,
        capture: Capture | None = None,
    ) -> None:
        check_tree(tree, "a small draft model", model.vocab_size)
        if model.state_shapes:
            raise ConfigError(
                f"{model.name_or_path!r} has recurrent layers, whose states no growing tree keeps: it can be a target "
                "but no draft model. Take a small draft model with attention alone, or lookups"
            )
        rows = tree.top_k * (tree.num_steps - 1)
        contents = f"a token and the {rows} rows of one tree of width {tree.top_k} and depth {tree.num_steps}"
        self._kv = make_kv_cache(config, model.kv_shapes, model.dtype, model.device, rows + 1, contents)
        sessions: KVLedger[TreeRows] = KVLedger(self._kv.scratch, model.max_model_len, rows)
        super().__init__(config, tree, None, torch.arange(model.vocab_size, device=model.device), sessions)
        self._model = model
        self._chunk_tokens = draft_model.max_prefill_tokens
        num_heads = model.heads_per_kv * model.num_kv_heads
        widths, batch = [tree.top_k] * (tree.num_steps - 1), config.cuda_graph_max_batch
        slots = plan_tree_slots(self._kv, model.kv_shapes, num_heads, model.max_model_len, widths, batch, capture)
        self._use_slots(slots, capture, model.vocab_size, torch.float32)
        self._backend: ForwardBackend = model
        self._capture = capture
        if slots:
            self._backend = KernelBackend(model, slots.trees.tiling, self._kv.scratch)

    @torch.inference_mode()
    def warm_up(self) -> None:
        super().warm_up()
        if self._slots and self._capture and isinstance(self._backend, KernelBackend):
            rows = self._slots.max_sessions * (self.tree.num_steps + 1)
            limits = CaptureLimits(rows, self._slots.max_sessions, self._kv.scratch)
            self._backend = GraphBackend(self._backend, self._kv, limits, self._capture)

    @property
    def work(self) -> DraftWork:
        return DraftWork(self.tree.num_steps, self.tree.num_steps * len(self._model.kv_shapes))

    def _claim(self, session: KVSession[TreeRows], context: DraftContext, busy: Collection[str]) -> bool:
        """Keep what the last tree ran for accepted tokens. The last token is always run again, for its logits."""
        accepted = session.state.path(context.tokens[:-1]) if session.state else NO_SLOTS
        self.sessions.keep(session, accepted)
        width = self.tree.top_k if context.proposal == "deterministic" else 1
        num_scratch = width * (self.tree.num_steps - 1) if context.budget.wants_tree else 0
        return self.sessions.claim(session, session.committed_length - len(session.slots), num_scratch, busy)

    def _has_state(self, context: DraftContext) -> bool:
        return context.budget.wants_tree

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Run all new tokens in passes of bounded size.

        Returns logits [S, V] behind the last token of each context that wants a tree.
        """
        logits = [torch.empty(0, self._model.vocab_size, device=self._model.device)]
        for segments in split_passes([self._new_rows(context) for context in contexts], self._chunk_tokens):
            # the next pass may overwrite the logits
            logits.append(self._backend.forward(self._backend.pack(segments), self._kv).logits.clone())
        return torch.cat(logits)

    def _new_rows(self, context: DraftContext) -> Segment:
        session = self.sessions[context.session]
        count, start = session.num_new, session.committed_length - session.num_new
        return Segment(
            tokens=np.array(context.tokens[len(context.tokens) - count :], dtype=np.int64),
            positions=np.arange(start, session.committed_length),
            slots=session.slots[start:],
            prefix=session.slots[:start],
            visible=None,
            logits_indices=np.arange(count - 1, count) if context.budget.wants_tree else np.arange(0),
        )

    def _expand(self, roots: Roots, shape: GrowthShape) -> Expansion:
        return ModelExpansion(self._model, self._kv, roots)

    def _rows_run(self, expansion: Expansion) -> Tensor | None:
        assert isinstance(expansion, ModelExpansion)
        return expansion.rows_run()

    def _keep_rows(self, contexts: Sequence[DraftContext], rows: Ints, top_k: int) -> None:
        for context, (tokens, parents) in zip(contexts, rows, strict=True):
            session = self.sessions[context.session]
            slots = session.scratch[: tokens.size].reshape(-1, top_k)
            session.state = TreeRows(tokens.reshape(-1, top_k), parents.reshape(-1, top_k), slots)


class ModelExpansion:
    """Expansion by a small draft model. Each level is one forward pass; a row attends to the prefix and to its own
    ancestors.

    Args:
        roots: states are the roots' logits [S, V]; the last slot of each prefix is the root's own. Each session needs as
            much scratch as its tree has rows.
    """

    def __init__(self, model: TargetModel, kv: KVCache, roots: Roots) -> None:
        self._model, self._kv, self._logits = model, kv, roots.states
        self._rows = roots.rows
        self._tokens: tuple[Tensor, ...] = ()
        self._parents: tuple[Tensor, ...] = ()

    def first(self) -> Tensor:
        return self._logits[:, None]

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        self._tokens, self._parents = (*self._tokens, tokens), (*self._parents, parents)
        self._rows = self._rows.level(level, parents, tokens)
        logits = self._model.forward(self._rows.packed, self._kv).logits
        return logits.view(*tokens.shape, -1)

    def rows_run(self) -> Tensor:
        """Return tokens, and rows of their parents in the level above, of all rows run so far, int64 [S, 2, L * W]."""
        if not self._tokens:
            return torch.zeros(len(self._logits), 2, 0, dtype=torch.int64, device=self._logits.device)
        return torch.stack([torch.cat(self._tokens, 1), torch.cat(self._parents, 1)], 1)


def split_passes(segments: Sequence[Segment], max_rows: int) -> Iterator[list[Segment]]:
    """Split causal segments into forward passes of at most `max_rows` rows each, in order."""
    batch: list[Segment] = []
    spare = max_rows
    for segment in segments:
        start = 0
        while start < len(segment.tokens):
            end = min(start + spare, len(segment.tokens))
            batch.append(segment.part(start, end))
            spare -= end - start
            start = end
            if spare == 0:
                yield batch
                batch, spare = [], max_rows
    if batch:
        yield batch
