"""The drafter that is a small causal LM (Leviathan et al. 2023): committed tokens in, draft trees or sampled chains out.

Legend: S sessions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.commit import Refusal
from eyas.config import EagleConfig, SmallConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, fill_in_trees
from eyas.drafters.calibration import noise_scale
from eyas.drafters.captured.prefix import tight_prefix
from eyas.drafters.captured.trees import CapturedTrees, Grower, Roots
from eyas.drafters.expand import chosen, grow, trees
from eyas.drafters.ranking import Ranker, Scorer
from eyas.drafters.sampled import FilteredDraft, chains, draw
from eyas.drafters.slots.sessions import SlotSessions, no_slots
from eyas.drafters.slots.sizing import count_slots
from eyas.drafters.small.expansion import SmallExpansion
from eyas.drafters.small.rows import TreeRows, tree_rows
from eyas.errors import ConfigError
from eyas.models.cuda.graphs import Capture
from eyas.models.inputs import Ints, Segment
from eyas.models.target import TargetModel
from eyas.models.tensors import download, upload
from eyas.tree import DraftTree


class SmallDrafter(LocalDrafter):
    """A small model with slots of its own. Not safe for use from several threads."""

    def __init__(
        self,
        model: TargetModel,
        tree: TreeConfig,
        config: EagleConfig,
        small: SmallConfig,
        capture: Capture | None = None,
    ) -> None:
        """capture: how to capture whole trees; None launches them.

        Raises ConfigError for a tree that the model cannot grow."""
        if tree.depth < 1 or tree.width > model.vocab_size:
            raise ConfigError(
                f"tree.depth {tree.depth} and tree.width {tree.width}: a small draft model needs a depth of at least 1 and "
                f"a width of at most its vocabulary, {model.vocab_size}"
            )
        rows = tree.width * (tree.depth - 1)
        what = f"a token and the {rows} rows of one tree of width {tree.width} and depth {tree.depth}"
        num_slots = count_slots(config, model.kv_shapes, model.dtype, model.device, rows + 1, what)
        self._model = model
        self._tree = tree
        self._config = config
        self._chunk_tokens = small.chunk_tokens
        self._pools = SlotPools(num_slots, model.kv_shapes, 0, model.dtype, model.device)
        self._sessions: SlotSessions[TreeRows] = SlotSessions(num_slots, model.context_length, rows)
        self._scale = noise_scale(config)
        self._ids = torch.arange(model.vocab_size, device=model.device)
        self._captured = CapturedTrees(self._grower(), config, capture) if capture else None

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds()

    @property
    def can_sample(self) -> bool:
        return True

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See Drafter. New tokens in passes of bounded size, then one pass per tree level for all sessions together."""
        self._scale.learn(contexts)
        busy = {context.session for context in contexts}
        drafts = [self._admit(context, busy) for context in contexts]
        ready = [i for i, draft in enumerate(drafts) if draft is None]
        logits = self._extend([contexts[i] for i in ready])
        for i in ready:
            drafts[i] = DraftTree.root_only(contexts[i].tokens[-1])
        wanting = [i for i in ready if contexts[i].budget.wants_tree]
        fill_in_trees(drafts, contexts, wanting, logits, self._grow, self._draw)
        return drafts

    @torch.inference_mode()
    def warm_up(self) -> None:
        if self._captured:
            self._captured.warm_up()

    def release(self, sessions: Sequence[str]) -> None:
        self._sessions.release(sessions)
        self._scale.forget(sessions)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        self._sessions.check()

    @property
    def num_free_slots(self) -> int:
        return self._sessions.num_free

    def _admit(self, context: DraftContext, busy: set[str]) -> Draft:
        """None if the context continues its session and has slots, those for its tree among them; else the answer to give.

        What the last tree ran of the accepted tokens is kept; the last one is run anew for its logits.
        """
        session = self._sessions.follow(context)
        if isinstance(session, Refusal):
            return session
        accepted = session.state.path(context.tokens[:-1]) if session.state else no_slots()
        self._sessions.keep(session, accepted)
        num_new = session.committed - len(session.slots)
        fits = self._sessions.claim(session, num_new, self._num_scratch(context), busy)
        return None if fits else DraftTree.root_only(context.tokens[-1])

    def _num_scratch(self, context: DraftContext) -> int:
        width = self._tree.width if context.proposal == "deterministic" else 1
        return width * (self._tree.depth - 1) if context.budget.wants_tree else 0

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Store keys and values of all new tokens; logits [S, V] behind the last of each context that wants a tree."""
        logits = [torch.empty(0, self._model.vocab_size, device=self._model.device)]
        for segments in passes([self._new_rows(context) for context in contexts], self._chunk_tokens):
            logits.append(self._model.forward(self._model.pack(segments), self._pools).logits)
        return torch.cat(logits)

    def _new_rows(self, context: DraftContext) -> Segment:
        session = self._sessions[context.session]
        count, start = session.num_new, session.committed - session.num_new
        return Segment(
            tokens=np.array(context.tokens[len(context.tokens) - count :], dtype=np.int64),
            positions=np.arange(start, session.committed),
            slots=session.slots[start:],
            prefix=session.slots[:start],
            visible=None,
            wanted=np.arange(count - 1, count) if context.budget.wants_tree else np.arange(0),
        )

    def _grow(self, contexts: Sequence[DraftContext], logits: Tensor) -> list[DraftTree]:
        sessions = [self._sessions[context.session] for context in contexts]
        slots, scratch = [session.slots for session in sessions], [session.scratch for session in sessions]
        replayed = self._captured.grow(contexts, slots, logits, self._scale, scratch) if self._captured else None
        if replayed:
            self._keep(contexts, replayed.ran, self._tree.width)
            return replayed.trees
        shape = self._shape(contexts, self._tree.width)
        ranker = Ranker(contexts, self._config, shape.depth, self._ids, self._scale, self._scale.grid)
        expansion = self._expand(contexts, logits, ranker, shape)
        candidates = grow(expansion, shape)
        self._scale.watch(contexts, candidates, ranker, self._ids)
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.nodes)) for c in contexts]
        columns, ran = download(chosen(candidates, budgets, self._ids), expansion.ran())
        self._keep(contexts, ran.astype(np.int64), shape.width)
        return trees(columns.tolist(), [c.tokens[-1] for c in contexts])

    def _draw(self, contexts: Sequence[DraftContext], logits: Tensor) -> list[DraftTree]:
        shape = self._shape(contexts, width=1)
        expansion = self._expand(contexts, logits, FilteredDraft(contexts, self._ids.device), shape)
        drawn, ran = download(draw(expansion, contexts, shape, self._config.law_tokens, self._ids), expansion.ran())
        self._keep(contexts, ran.astype(np.int64), shape.width)
        return chains(drawn.tolist(), contexts, shape)

    def _grower(self) -> Grower[SmallExpansion]:
        model, tree, pools = self._model, self._tree, self._pools

        def expand(roots: Roots, scorer: Scorer) -> SmallExpansion:
            return SmallExpansion(model, scorer, pools, roots.prefix, roots.scratch, roots.states, tree)

        return Grower(
            expand,
            lambda expansion: grow(expansion, tree),
            tree,
            model.vocab_size,
            torch.float32,
            self._ids,
            spare=pools.scratch,
            num_slots=pools.scratch,
            longest=min(model.context_length, pools.scratch),
            num_scratch=tree.width * (tree.depth - 1),
            ran=SmallExpansion.ran,
        )

    def _shape(self, contexts: Sequence[DraftContext], width: int) -> TreeConfig:
        return TreeConfig(self._tree.nodes, min(self._tree.depth, max(c.budget.max_depth for c in contexts)), width)

    def _expand(self, contexts: Sequence[DraftContext], logits: Tensor, scorer: Scorer, shape: TreeConfig) -> SmallExpansion:
        sessions = [self._sessions[context.session] for context in contexts]
        prefix = tight_prefix([session.slots for session in sessions], logits.device)
        scratch = upload(np.stack([session.scratch for session in sessions]), logits.device)
        return SmallExpansion(self._model, scorer, self._pools, prefix, scratch, logits, shape)

    def _keep(self, contexts: Sequence[DraftContext], ran: Ints, width: int) -> None:
        for context, rows in zip(contexts, ran, strict=True):
            session = self._sessions[context.session]
            session.state = tree_rows(rows, session.scratch, width)


def passes(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """Causal segments in forward passes of at most `most` rows, cut where they do not fit; their order stays."""
    batch: list[Segment] = []
    room = most
    for segment in segments:
        start = 0
        while start < len(segment.tokens):
            end = min(start + room, len(segment.tokens))
            batch.append(_part(segment, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def _part(segment: Segment, start: int, end: int) -> Segment:
    return Segment(
        tokens=segment.tokens[start:end],
        positions=segment.positions[start:end],
        slots=segment.slots[start:end],
        prefix=np.concatenate([segment.prefix, segment.slots[:start]]),
        visible=None,
        wanted=segment.wanted[(segment.wanted >= start) & (segment.wanted < end)] - start,
    )
