"""What a small model's last tree ran through it: tokens in, slots of accepted rows out. Integers only.

Keys and values of a token depend on the tokens before it alone: what a tree computed for accepted tokens is kept.
Legend: L levels of a tree that were run through the model, W rows of each.

A small model in the middle of growing trees: logits of roots in, scored children of each level out.

Legend: S sessions, W rows of a level, L levels that are run, P longest prefix, V vocabulary.

The drafter that is a small causal LM (Leviathan et al. 2023): committed tokens in, draft trees or sampled chains out.

Legend: S sessions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, DraftModelConfig, TreeConfig
from eyas.draft_protocol import ResyncRequired
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, fill_in_trees
from eyas.drafters.cuda_graphs import Grower, PaddedPrefix, Roots, TreeGraphs, tight_prefix
from eyas.drafters.sampled_chains import FilteredDraft, chains, draw
from eyas.drafters.scoring import Ranker, Scorer, noise_scale
from eyas.drafters.sessions import SlotSessions, count_slots, no_slots
from eyas.drafters.tree_growth import chosen, grow, trees
from eyas.errors import ConfigError
from eyas.models.cuda.graphs import Capture
from eyas.models.inputs import Group, PackedInputs, Segment
from eyas.models.target import TargetModel
from eyas.tensors import Ints, download, upload
from eyas.tree import DraftTree


@dataclass(frozen=True)
class TreeRows:
    """What the last tree ran through the model, [L, W] each: tokens, rows of their parents in the level above, slots."""

    tokens: Ints
    parents: Ints
    slots: Slots

    def path(self, tokens: Sequence[int]) -> Slots:
        """Slots of the rows that lead from the root along `tokens`, as far as there are any."""
        row, found = 0, []
        for level, token in enumerate(tokens[: len(self.tokens)]):
            (rows,) = np.nonzero((self.tokens[level] == token) & (self.parents[level] == row))
            if not len(rows):
                break
            row = int(rows[0])
            found.append(self.slots[level, row])
        return np.array(found, dtype=np.int64)


def tree_rows(ran: Ints, scratch: Slots, width: int) -> TreeRows:
    """ran: tokens and parents of all rows, level by level, [2, L * W]. scratch: slots of a tree, the first ones theirs."""
    tokens, parents = ran.reshape(2, -1, width)
    return TreeRows(tokens, parents, scratch[: tokens.size].reshape(-1, width))


class ModelExpansion:
    """Implements Expansion: each level is one forward pass, whose rows see the prefix and their own ancestors."""

    def __init__(
        self,
        model: TargetModel,
        scorer: Scorer,
        pools: KVCache,
        prefix: PaddedPrefix,
        scratch: Tensor,
        logits: Tensor,
        shape: TreeConfig,
    ) -> None:
        """prefix: slots of each session's tokens, the root's the last. scratch: W * (depth - 1) slots of each or more, int64
        [S, ...]. logits: of the roots [S, V]."""
        self._model, self._scorer, self._pools, self._logits = model, scorer, pools, logits
        index, lengths = prefix.index, prefix.lengths
        self._length = index.shape[1]
        self._keys = torch.cat([index, scratch], 1)
        places = torch.arange(self._length, device=logits.device)
        self._seen = (places < lengths[:, None])[:, None].expand(-1, shape.top_k, -1)
        self._root = lengths[:, None] - 1
        self._key_positions = places.expand(len(index), -1)
        self._tokens = [index[:, :0]]
        self._parents = [index[:, :0]]

    def first(self) -> Tensor:
        return self._scorer.scores(self._logits[:, None], 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        sessions, width = tokens.shape
        self._tokens.append(tokens)
        self._parents.append(parents)
        # a session near the end of its context is expanded with the others; its budget cuts what lies beyond
        positions = (self._root + level).clamp(max=self._model.max_model_len - 1).expand_as(tokens)
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(sessions, -1, -1)
        inherited = self._seen.gather(1, parents[:, :, None].expand(-1, -1, self._seen.shape[2]))
        self._seen = torch.cat([inherited, own], dim=2)
        self._key_positions = torch.cat([self._key_positions, positions], dim=1)
        end = self._length + width * level
        packed = self._pack(tokens, positions, self._keys[:, :end], self._keys[:, end - width : end])
        logits = self._model.forward(packed, self._pools).logits
        return self._scorer.scores(logits.view(sessions, width, -1), level)

    def ran(self) -> Tensor:
        """Tokens, and rows of their parents in the level above, of all rows that were run, int64 [S, 2, L * W]."""
        return torch.stack([torch.cat(self._tokens, 1), torch.cat(self._parents, 1)], 1)

    def _pack(self, tokens: Tensor, positions: Tensor, keys: Tensor, slots: Tensor) -> PackedInputs:
        rows = torch.arange(tokens.numel(), device=tokens.device)
        group = LevelGroup(rows.view_as(tokens), keys, self._seen, positions, self._key_positions)
        return PackedInputs(tokens.flatten(), positions.flatten(), slots.flatten(), rows, (group,))


class LevelGroup(Group):
    """One level of all sessions' trees. What Group lays out from segments is on the device already."""

    def __init__(self, rows: Tensor, keys: Tensor, mask: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        self.shape = (rows.shape[0], rows.shape[1])
        self.run = None
        self.whole = True
        self.open = False
        self.cells = None
        self.rows = rows
        self.keys = keys
        self.mask = mask
        self.query_positions = query_positions
        self.key_positions = key_positions


class ModelDrafter(LocalDrafter):
    """A small model with slots of its own. Not safe for use from several threads."""

    def __init__(
        self,
        model: TargetModel,
        tree: TreeConfig,
        config: DraftingConfig,
        small: DraftModelConfig,
        capture: Capture | None = None,
    ) -> None:
        """capture: how to capture whole trees; None launches them.

        Raises ConfigError for a tree that the model cannot grow."""
        if tree.num_steps < 1 or tree.top_k > model.vocab_size:
            raise ConfigError(
                f"tree.num_steps {tree.num_steps} and tree.top_k {tree.top_k}: a small draft model needs a depth of at least 1 and "
                f"a width of at most its vocabulary, {model.vocab_size}"
            )
        rows = tree.top_k * (tree.num_steps - 1)
        what = f"a token and the {rows} rows of one tree of width {tree.top_k} and depth {tree.num_steps}"
        num_slots = count_slots(config, model.kv_shapes, model.dtype, model.device, rows + 1, what)
        self._model = model
        self._tree = tree
        self._config = config
        self._chunk_tokens = small.chunk_tokens
        self._pools = KVCache(num_slots, model.kv_shapes, 0, model.dtype, model.device)
        self._sessions: SlotSessions[TreeRows] = SlotSessions(num_slots, model.max_model_len, rows)
        self._scale = noise_scale(config)
        self._ids = torch.arange(model.vocab_size, device=model.device)
        self._captured = TreeGraphs(self._grower(), config, capture) if capture else None

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
        if isinstance(session, ResyncRequired):
            return session
        accepted = session.state.path(context.tokens[:-1]) if session.state else no_slots()
        self._sessions.keep(session, accepted)
        num_new = session.committed_length - len(session.slots)
        fits = self._sessions.claim(session, num_new, self._num_scratch(context), busy)
        return None if fits else DraftTree.root_only(context.tokens[-1])

    def _num_scratch(self, context: DraftContext) -> int:
        width = self._tree.top_k if context.proposal == "deterministic" else 1
        return width * (self._tree.num_steps - 1) if context.budget.wants_tree else 0

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Store keys and values of all new tokens; logits [S, V] behind the last of each context that wants a tree."""
        logits = [torch.empty(0, self._model.vocab_size, device=self._model.device)]
        for segments in passes([self._new_rows(context) for context in contexts], self._chunk_tokens):
            logits.append(self._model.forward(self._model.pack(segments), self._pools).logits)
        return torch.cat(logits)

    def _new_rows(self, context: DraftContext) -> Segment:
        session = self._sessions[context.session]
        count, start = session.num_new, session.committed_length - session.num_new
        return Segment(
            tokens=np.array(context.tokens[len(context.tokens) - count :], dtype=np.int64),
            positions=np.arange(start, session.committed_length),
            slots=session.slots[start:],
            prefix=session.slots[:start],
            visible=None,
            logits_indices=np.arange(count - 1, count) if context.budget.wants_tree else np.arange(0),
        )

    def _grow(self, contexts: Sequence[DraftContext], logits: Tensor) -> list[DraftTree]:
        sessions = [self._sessions[context.session] for context in contexts]
        slots, scratch = [session.slots for session in sessions], [session.scratch for session in sessions]
        replayed = self._captured.grow(contexts, slots, logits, self._scale, scratch) if self._captured else None
        if replayed:
            self._keep(contexts, replayed.ran, self._tree.top_k)
            return replayed.trees
        shape = self._shape(contexts, self._tree.top_k)
        ranker = Ranker(contexts, self._config, shape.num_steps, self._ids, self._scale, self._scale.grid)
        expansion = self._expand(contexts, logits, ranker, shape)
        candidates = grow(expansion, shape)
        self._scale.watch(contexts, candidates, ranker, self._ids)
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.num_draft_tokens)) for c in contexts]
        columns, ran = download(chosen(candidates, budgets, self._ids), expansion.ran())
        self._keep(contexts, ran.astype(np.int64), shape.top_k)
        return trees(columns.tolist(), [c.tokens[-1] for c in contexts])

    def _draw(self, contexts: Sequence[DraftContext], logits: Tensor) -> list[DraftTree]:
        shape = self._shape(contexts, width=1)
        expansion = self._expand(contexts, logits, FilteredDraft(contexts, self._ids.device), shape)
        drawn, ran = download(draw(expansion, contexts, shape, self._config.proposal_top_k, self._ids), expansion.ran())
        self._keep(contexts, ran.astype(np.int64), shape.top_k)
        return chains(drawn.tolist(), contexts, shape)

    def _grower(self) -> Grower[ModelExpansion]:
        model, tree, pools = self._model, self._tree, self._pools

        def expand(roots: Roots, scorer: Scorer) -> ModelExpansion:
            return ModelExpansion(model, scorer, pools, roots.prefix, roots.scratch, roots.states, tree)

        return Grower(
            expand,
            lambda expansion: grow(expansion, tree),
            tree,
            model.vocab_size,
            torch.float32,
            self._ids,
            spare=pools.scratch,
            num_slots=pools.scratch,
            longest=min(model.max_model_len, pools.scratch),
            num_scratch=tree.top_k * (tree.num_steps - 1),
            ran=ModelExpansion.ran,
        )

    def _shape(self, contexts: Sequence[DraftContext], width: int) -> TreeConfig:
        return TreeConfig(
            self._tree.num_draft_tokens, min(self._tree.num_steps, max(c.budget.max_depth for c in contexts)), width
        )

    def _expand(self, contexts: Sequence[DraftContext], logits: Tensor, scorer: Scorer, shape: TreeConfig) -> ModelExpansion:
        sessions = [self._sessions[context.session] for context in contexts]
        prefix = tight_prefix([session.slots for session in sessions], logits.device)
        scratch = upload(np.stack([session.scratch for session in sessions]), logits.device)
        return ModelExpansion(self._model, scorer, self._pools, prefix, scratch, logits, shape)

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
        logits_indices=segment.logits_indices[(segment.logits_indices >= start) & (segment.logits_indices < end)] - start,
    )
